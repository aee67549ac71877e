"""The batch orders of all jobs of a stack, flat, so that a step finds its samples by counting.

Shapes: J jobs, B samples of a batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from fedproto.data.federation import Federation
from fedproto.engines.augment import gather_moved
from fedproto.engines.base import LocalJob
from fedproto.rng import Indices
from fedproto.rng.schedule import BatchOrder

NONE = -1
"""Fills up the last batch of an epoch."""


@dataclass(frozen=True)
class StackOrders:
    """Which samples each job sees at each step.

    Attributes:
        samples: Indices of samples; a job's batches lie one after another, all of full length.
        start: Where each job's batches begin.
        steps: The jobs' numbers of steps.
        last_epoch: The step at which each job's last epoch begins.
        last_samples: The number of samples of each job's last epoch.
        moves: How each image is moved and mirrored, where images are varied: ``[…, 3]``.
    """

    samples: Indices
    start: Indices
    steps: Indices
    last_epoch: Indices
    last_samples: Indices
    moves: Indices | None = None


def stack_orders(jobs: Sequence[LocalJob], federation: Federation) -> StackOrders:
    """Draws the jobs' batch orders.

    Runs of a sweep share their orders, and a straggler's is the beginning of the full one, so each
    is drawn once, however many jobs use it.
    """
    epochs: dict[BatchOrder, int] = {}
    for job in jobs:
        shared = _shared(job.batches)
        epochs[shared] = max(epochs.get(shared, 0), _epochs_begun(job.batches))
    starts: dict[BatchOrder, int] = {}
    parts: list[Indices] = []
    moves: list[Indices] = []
    augment, total = jobs[0].augment, 0
    for order, number in epochs.items():
        starts[order] = total
        own = federation.train_indices(order.client)
        length = order.steps_per_epoch * order.batch_size
        samples = np.full((number, length), NONE, dtype=np.int64)
        for epoch in range(number):
            samples[epoch, : order.num_examples] = own[order.epoch(epoch)]
            if augment is not None:
                found = augment.moves(augment.draws(order, epoch)[order.epoch(epoch)])
                moves.append(np.pad(found, ((0, length - len(found)), (0, 0))))
        parts.append(samples.reshape(-1))
        total += number * length
    # A finished job continues to read until the others are done: there is always a last entry.
    parts.append(np.full(1, NONE, dtype=np.int64))
    last = [_last_epoch(job.batches) for job in jobs]
    return StackOrders(
        samples=np.concatenate(parts),
        start=np.array([starts[_shared(job.batches)] for job in jobs], dtype=np.int64),
        steps=np.array([job.batches.steps for job in jobs], dtype=np.int64),
        last_epoch=np.array([first for first, _ in last], dtype=np.int64),
        last_samples=np.array([samples for _, samples in last], dtype=np.int64),
        moves=np.concatenate([*moves, np.zeros((1, 3), dtype=np.int64)]) if moves else None,
    )


def _shared(order: BatchOrder) -> BatchOrder:
    """The common order of jobs with the same samples and different numbers of steps."""
    return replace(order, epochs=0, max_steps=0)


def _epochs_begun(order: BatchOrder) -> int:
    return -(-order.steps // order.steps_per_epoch)


def _last_epoch(order: BatchOrder) -> tuple[int, int]:
    """The first step of the last epoch, and its number of samples."""
    first = max(_epochs_begun(order) - 1, 0) * order.steps_per_epoch
    return first, min((order.steps - first) * order.batch_size, order.num_examples)


def next_batch(
    inputs: Tensor,
    targets: Tensor,
    samples: Tensor,
    start: Tensor,
    steps: Tensor,
    rate: Tensor,
    count: Tensor,
    batch_size: int,
    moves: Tensor | None = None,
    *,
    scaled: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The batches of a step.

    Returns:
        Inputs and targets ``[J, B, …]``; which samples exist; their weights, by which the loss is
        a mean over the true batch (times the rate if `scaled`); and the jobs' rates, 0 for finished
        ones.
    """
    offset = count * batch_size + torch.arange(batch_size, device=start.device)
    places = (start.unsqueeze(1) + offset).clamp(max=len(samples) - 1)
    index = samples[places]
    busy = count < steps
    live = (index >= 0) & busy.unsqueeze(1)
    index = index.clamp(min=0)
    rate = torch.where(busy, rate, 0)
    weight = live.to(rate.dtype) / live.sum(dim=1, keepdim=True).clamp(min=1)
    weight = weight * rate.unsqueeze(1) if scaled else weight
    x = inputs[index] if moves is None else gather_moved(inputs, index, moves[places], 0)
    return x, targets[index], live, weight, rate


def end_step(total: Tensor, loss: Tensor, live: Tensor, last_epoch: Tensor, count: Tensor) -> None:
    """Adds the losses that belong to a last epoch, and counts the step."""
    counts = live & (count >= last_epoch).unsqueeze(1)
    total.add_(torch.where(counts, loss, 0).sum(dim=1))
    count.add_(1)
