"""The batch orders of all jobs of a stack, flat, so that a step finds its samples by counting.

Shapes: J jobs, B samples of a batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedproto.data.federation import Federation
from fedproto.engines.base import LocalJob
from fedproto.rng import Indices
from fedproto.rng.schedule import BatchOrder

NONE = -1
"""Fills up the last batch of an epoch."""


class _Epoch(NamedTuple):
    """One epoch of an order: when it begins, where it lies, and of whose samples it is."""

    step: int
    start: int
    order: BatchOrder
    number: int
    own: Indices


@dataclass(frozen=True)
class StackOrders:
    """Which samples each job sees at each step.

    Attributes:
        samples: Indices of samples; a job's batches lie one after another, all of full length.
            What has not been drawn yet is `NONE`.
        last_epoch: The step at which each job's last epoch begins.
        waiting: What is to be drawn, by the step at which it begins; the last first.
    """

    samples: Indices
    start: Indices
    steps: Indices
    last_epoch: Indices
    last_samples: Indices
    waiting: list[_Epoch]

    def draw(self, steps: int) -> None:
        """Draws all that begins before a step; the rest can wait until a device is at work."""
        while self.waiting and self.waiting[-1].step < steps:
            epoch = self.waiting.pop()
            positions = epoch.order.epoch(epoch.number)
            self.samples[epoch.start : epoch.start + len(positions)] = epoch.own[positions]


def stack_orders(jobs: Sequence[LocalJob], federation: Federation) -> StackOrders:
    """Lays the jobs' batch orders out; nothing is drawn yet.

    Runs of a sweep share their orders, and a straggler's is the beginning of the full one, so each
    is drawn once, however many jobs use it.
    """
    begun: dict[BatchOrder, int] = {}
    for job in jobs:
        shared = _shared(job.batches)
        begun[shared] = max(begun.get(shared, 0), _epochs_begun(job.batches))
    waiting = []
    starts: dict[BatchOrder, int] = {}
    total = 0
    for order, number in begun.items():
        starts[order] = total
        own = federation.train_indices(order.client)
        for epoch in range(number):
            waiting.append(_Epoch(epoch * order.steps_per_epoch, total, order, epoch, own))
            total += order.steps_per_epoch * order.batch_size
    last = [_last_epoch(job.batches) for job in jobs]
    return StackOrders(
        # A finished job goes on reading until the others are done: there is always something.
        samples=np.full(total + 1, NONE, dtype=np.int64),
        start=np.array([starts[_shared(job.batches)] for job in jobs], dtype=np.int64),
        steps=np.array([job.batches.steps for job in jobs], dtype=np.int64),
        last_epoch=np.array([first for first, _ in last], dtype=np.int64),
        last_samples=np.array([samples for _, samples in last], dtype=np.int64),
        waiting=sorted(waiting, key=lambda epoch: -epoch.step),
    )


def _shared(order: BatchOrder) -> BatchOrder:
    """What jobs with the same samples in the same order have in common."""
    return replace(order, epochs=0, max_steps=0)


def _epochs_begun(order: BatchOrder) -> int:
    return -(-order.steps // order.steps_per_epoch)


def _last_epoch(order: BatchOrder) -> tuple[int, int]:
    begun = _epochs_begun(order)
    first = max(begun - 1, 0) * order.steps_per_epoch
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
    *,
    scaled: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """What a step works on.

    Returns:
        Inputs and targets ``[J, B, …]``; which samples count; how much each does, so that the loss
        is a mean over the true batch; and the jobs' rates, 0 for finished ones.
    """
    offset = count * batch_size + torch.arange(batch_size, device=start.device)
    index = samples[(start.unsqueeze(1) + offset).clamp(max=len(samples) - 1)]
    busy = count < steps
    live = (index >= 0) & busy.unsqueeze(1)
    index = index.clamp(min=0)
    rate = torch.where(busy, rate, 0)
    weight = live.to(rate.dtype) / live.sum(dim=1, keepdim=True).clamp(min=1)
    weight = weight * rate.unsqueeze(1) if scaled else weight
    return inputs[index], targets[index], live, weight, rate


def end_step(total: Tensor, loss: Tensor, live: Tensor, last_epoch: Tensor, count: Tensor) -> None:
    """Adds the losses that belong to a last epoch, and counts the step."""
    counts = live & (count >= last_epoch).unsqueeze(1)
    total.add_(torch.where(counts, loss, 0).sum(dim=1))
    count.add_(1)
