"""The guard: what an update must be before it may enter the average, wherever it came from.

A client is never trusted, in a simulation no more than over a network: names, shapes, types,
ranges and claims are compared with what the job asked for. What passes can still be a bad model;
the guard keeps the numbers usable and the weights of clients honest, no more.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedproto.engines.job import LocalJob
from fedproto.strategies.contract import Declarations, Setting
from fedproto.types import ClientUpdate, ServerState, Tensors, Updates

LARGEST_GROWTH = 1e4
"""No parameter grows in one round beyond this many times the largest that was sent, and one."""

LARGEST_STATISTIC = 1e15
VARIANCE = "running_var"
"""How PyTorch's batch normalisation calls what must never be negative."""

OUTLIER = 1000.0
FEWEST_TO_COMPARE = 3


@dataclass(frozen=True)
class Expected:
    """What an update must look like.

    Attributes:
        sent: What it was trained from: names, shapes and types of parameters and buffers.
        payload: What it adds, as the strategy declares it.
    """

    client: int
    num_examples: int
    epochs: int
    sent: ServerState
    payload: Declarations

    @staticmethod
    def of(job: LocalJob, setting: Setting) -> Expected:
        """What a job asks for."""
        number = job.batches.num_examples
        return Expected(
            job.client, number, job.batches.epochs, job.state, job.strategy.payload(setting, number)
        )


def reason_to_refuse(update: ClientUpdate, expected: Expected) -> str | None:
    """Why an update must not enter the average; None when it may."""
    reason = (
        _reason_by_claims(update, expected)
        or _reason_by_layout("params", update.params, _layout(expected.sent.params))
        or _reason_by_layout("buffers", update.buffers, _layout(expected.sent.buffers))
        or _reason_by_layout(
            "payload",
            update.payload,
            {name: (one.shape, one.dtype) for name, one in expected.payload.items()},
        )
    )
    if reason is not None:
        return reason
    checks = list(_value_checks(update, expected))
    # All verdicts at once: asking one by one would wait for a GPU once per tensor.
    device = next(iter(update.params.values())).device if update.params else torch.device("cpu")
    verdicts = [verdict.view(-1).to(device, non_blocking=True) for _, verdict in checks]
    found = torch.cat(verdicts).tolist() if verdicts else []
    reasons = [reason for several, _ in checks for reason in several]
    for reason, good in zip(reasons, found, strict=True):
        if not good:
            return reason
    if update.train_loss is not None and not math.isfinite(update.train_loss):
        return "its training loss is not finite"
    return None


def _reason_by_claims(update: ClientUpdate, expected: Expected) -> str | None:
    if update.client != expected.client:
        return f"the update says it is of client {update.client}"
    if update.num_examples != expected.num_examples:
        return f"it claims {update.num_examples} samples; it has {expected.num_examples}"
    if not 0 <= update.epochs_done <= expected.epochs:
        return f"it claims {update.epochs_done} epochs of {expected.epochs}"
    return None


def _layout(tensors: Tensors) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}


def _reason_by_layout(
    kind: str, given: Tensors, wanted: Mapping[str, tuple[tuple[int, ...], torch.dtype]]
) -> str | None:
    if given.keys() != wanted.keys():
        odd = sorted(given.keys() ^ wanted.keys())[0]
        fault = "is missing" if odd in wanted else "is unknown"
        return f"{kind} '{odd}' {fault}"
    for name, found in _layout(given).items():
        for what, has, needs in zip(("shape", "type"), found, wanted[name], strict=True):
            if has != needs:
                return f"tensor '{name}' has {what} {has}, not {needs}"
    return None


def outliers(updates: Updates, sent: Tensors, times: float | None = None) -> dict[int, str]:
    """Why updates must not enter the average beside the others, by client.

    Finite numbers can still be absurd, and what is absurd the cohort tells: clients that were sent
    the same weights do not go a thousand times as far as most of them.

    Args:
        updates: Those that each by itself may enter.
        sent: The parameters that all of them began with.
        times: So many times as far as most is too far; None for a thousand.
    """
    times = OUTLIER if times is None else times
    names = [name for name, tensor in sent.items() if tensor.is_floating_point()]
    if not names or len(updates) < FEWEST_TO_COMPARE:
        return {}
    begun = [sent[name] for name in names]
    lengths: list[Tensor] = []
    for update in updates:
        ways = torch._foreach_sub([update.params[name] for name in names], begun)
        # On a CPU a norm takes some twenty times as long as a product; one that runs over is
        # infinite, which is far enough.
        lengths += (
            torch._foreach_norm(ways)
            if ways[0].is_cuda
            else [torch.dot(way.flatten(), way.flatten()).sqrt() for way in ways]
        )
    way_k = torch.stack(lengths).double().view(len(updates), -1).norm(dim=1).cpu()
    moved_k = way_k[way_k > 0]
    if len(moved_k) < FEWEST_TO_COMPARE:
        return {}
    usual = float(moved_k.median())
    return {
        update.client: f"it went {way / usual:.3g} times as far as most of its cohort"
        for update, way in zip(updates, way_k.tolist(), strict=True)
        if not way <= times * usual
    }


def _value_checks(update: ClientUpdate, expected: Expected) -> Iterator[tuple[list[str], Tensor]]:
    """What may be wrong with the values, and for each of it whether all is well."""
    params = {
        name: one for name, one in update.params.items() if one.is_floating_point() and one.numel()
    }
    if params:
        sent = torch.stack([expected.sent.largest[name] for name in params]).double()
        yield (
            [
                f"tensor '{name}' is not finite, or beyond belief, after local training (learning"
                " rate too high?)"
                for name in params
            ],
            _sizes(list(params.values())) <= LARGEST_GROWTH * (1 + sent),
        )
    for name, tensor in update.buffers.items():
        if tensor.is_floating_point():
            low = 0.0 if name.endswith(VARIANCE) else -LARGEST_STATISTIC
            yield (
                [f"buffer '{name}' is not within [{low:g}, {LARGEST_STATISTIC:g}]"],
                _within(tensor, low, LARGEST_STATISTIC),
            )
    for name, one in expected.payload.items():
        tensor = update.payload[name]
        bounds = f"[{one.low:g}, {one.high:g}]"
        yield [f"payload '{name}' is not within {bounds}"], _within(tensor, one.low, one.high)
        if math.isfinite(one.total):
            # Each value was bounded first, and a sum of several cannot run over in float64.
            total = tensor.clamp(one.low, one.high).double().sum()
            yield [f"payload '{name}' sums up to more than {one.total:g}"], total <= one.total
        if one.zero_where is not None:
            empty = update.payload[one.zero_where] == 0
            yield (
                [f"payload '{name}' is not zero where '{one.zero_where}' is"],
                (tensor[empty] == 0).all(),
            )


def _sizes(tensors: Sequence[Tensor]) -> Tensor:
    """The largest size of a number in each tensor; NaN where one is."""
    if tensors[0].is_cuda:  # one operation for all of them: a GPU waits for the host otherwise
        return torch.stack(torch._foreach_norm(list(tensors), math.inf)).double()
    ends = [torch.stack(tensor.aminmax()) for tensor in tensors]  # the norm is slow on a CPU
    return torch.stack(ends).double().abs().amax(dim=1)


def _within(tensor: Tensor, low: float, high: float) -> Tensor:
    """Whether all values are numbers between two; comparing with NaN is false."""
    if not tensor.numel():
        return torch.ones((), dtype=torch.bool, device=tensor.device)
    # One pass that writes nothing, however large the model.
    smallest, largest = tensor.aminmax()
    return (smallest >= low) & (largest <= high)
