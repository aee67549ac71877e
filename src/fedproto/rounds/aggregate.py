"""The end of a round, one pure function for the simulator and both ways over Flower.

guard ► weigh ► rule ► server step ► served model. A client is never trusted, in a simulation no
more than over a network: names, shapes, types, ranges and claims of an update are compared with
what the job asked for. An update that passes can still be a bad model; the guard keeps the numbers
usable and the weights of clients honest, no more.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedproto.engines.base import LocalJob
from fedproto.errors import TrainingError
from fedproto.rounds.claims import FEWEST, bound_claims, bound_steps, implausible, merge_by_rule
from fedproto.strategies.aggregation import combine, summed, update_norms
from fedproto.strategies.sections import Method
from fedproto.strategies.values import Declarations, Setting
from fedproto.types import ClientFailure, ClientUpdate, ClientWeights, ServerState, Tensors, Updates

LARGEST_GROWTH = 1e4
"""Largest plausible growth of a parameter in one round, relative to the largest sent value + 1."""

LARGEST_STATISTIC = 1e15

OUTLIER = 1000.0


@dataclass(frozen=True)
class RoundOutcome:
    """A round whose updates are weighed and combined.

    Attributes:
        state: The next state.
        updates: The updates that were used, by client.
        attention: The weight of each client in the average.
        failures: Why an update was not used, per client.
        note: Why the model did not change; None where it did.
    """

    state: ServerState
    updates: list[ClientUpdate]
    attention: dict[int, float]
    failures: dict[int, str]
    note: str | None = None


def aggregate_round(
    method: Method,
    state: ServerState,
    results: Sequence[tuple[LocalJob, ClientUpdate | ClientFailure]],
    setting: Setting,
) -> RoundOutcome:
    """Checks, weighs and combines the updates of a round, each with the job that it is of.

    The result is a function of its arguments; the order of the updates does not matter.
    """
    failures = {one.client: one.reason for _, one in results if isinstance(one, ClientFailure)}
    updates: list[ClientUpdate] = []
    for job, result in results:
        if isinstance(result, ClientFailure):
            continue
        reason = reason_to_refuse(result, job, setting)
        if reason is None:
            updates.append(result)
        else:
            failures[job.client] = reason
    # Sums of floating-point numbers depend on their order.
    updates.sort(key=lambda update: update.client)
    declared = method.payload(setting, 1)
    apart = outliers(updates, state.params, method.aggregate.drop_beyond)
    updates = [update for update in updates if update.client not in apart]
    if method.aggregate.distrusts:
        apart |= implausible(updates, declared)
        updates = [update for update in updates if update.client not in apart]
    failures |= apart
    updates = bound_claims(method.aggregate, updates, declared)
    combined = combine_updates(method, state, updates, setting) if updates else None
    if combined is None:
        stays = replace(state, round=state.round + 1)
        note = "the model did not move: " + (
            "no client sent a usable update"
            if not updates
            else "the combined updates are not finite (learning rate too high?)"
        )
        return RoundOutcome(stays, updates, {}, failures, note)
    following, weights = combined
    clients = (update.client for update in updates)
    return RoundOutcome(following, updates, dict(zip(clients, weights, strict=True)), failures)


def combine_updates(
    method: Method, state: ServerState, updates: Updates, setting: Setting
) -> tuple[ServerState, list[float]] | None:
    """The next state and each client's weight; None where either is not finite.

    Every update was usable by itself; still their distances may overflow in an attention, or a
    server optimizer diverge. Such a round must spoil neither the model nor the record.
    """
    strategy, options = method.strategy, method.aggregate
    weighed = strategy.weigh(state, bound_steps(options, updates))
    weights = _checked(method, weighed, len(updates))
    weights = method.head.weigh(weights, updates, setting)
    combined, counted = combine(options, state, updates, weights)
    declared = method.payload(setting, 1)
    updates = merge_by_rule(options, updates, declared)
    if strategy.server_memory(setting):
        memory = {**state.memory, **strategy.remember(state, updates, setting)}
        parts = [strategy.adds(state, update, setting, len(updates)) for update in updates]
        memory |= {
            name: memory[name] + one for name, one in summed(options, updates, parts).items()
        }
        combined = replace(combined, memory=memory)
        combined = replace(combined, params=strategy.correct(combined, setting))
    following = method.serve_models(method.server.step(state, combined), state, updates, setting)
    return (following, counted.tolist()) if _finite(following, counted) else None


def _finite(state: ServerState, counted: Tensor) -> bool:
    tensors = [*state.params.values(), *state.buffers.values(), *state.memory.values()]
    if state.served_model is not None:
        tensors += [*state.served.params.values(), *state.served.buffers.values()]
    # All results at once and in one place: memory may lie elsewhere than the model.
    device = tensors[0].device if tensors else torch.device("cpu")
    finite = [
        torch.isfinite(one).all().to(device, non_blocking=True)
        for one in tensors
        if one.is_floating_point()
    ]
    return bool(torch.isfinite(counted).all()) and (not finite or bool(torch.stack(finite).all()))


def _checked(method: Method, weights: ClientWeights, clients: int) -> ClientWeights:
    """A strategy's weights, checked."""
    name = f"{type(method.strategy).__name__}.weigh()"
    if not isinstance(weights, ClientWeights):
        raise TrainingError(
            f"{name} must return ClientWeights(weights), not a {type(weights).__name__}"
        )
    for share in (weights.client, *(weights.tensor or {}).values()):
        if not isinstance(share, Tensor) or share.shape[:1] != (clients,):
            raise TrainingError(f"{name} must give one weight per update, {clients} here")
        total = share.sum(dim=0).flatten()
        wrong = total.isfinite() & ((total - 1).abs() > 1e-3)
        if share.dim() > 1:
            wrong &= total != 0
        if bool(wrong.any()):
            found = float(total[wrong][0])
            raise TrainingError(f"{name} must give weights that sum to 1; these sum to {found:.4g}")
    return weights


def sent_back(job: LocalJob, setting: Setting) -> Tensors:
    """The received parameters that a client sends back trained: all but personal ones."""
    personal = frozenset(job.strategy.personal(setting))
    return {name: one for name, one in job.state.params.items() if name not in personal}


def reason_to_refuse(update: ClientUpdate, job: LocalJob, setting: Setting) -> str | None:
    """The reason to reject an update of a job; None for a usable one."""
    declared = job.method.payload(setting, job.batches.num_examples)
    reason = (
        _reason_by_claims(update, job)
        or _reason_by_layout("params", update.params, _layout(sent_back(job, setting)))
        or _reason_by_layout("buffers", update.buffers, _layout(job.state.buffers))
        or _reason_by_layout(
            "payload",
            update.payload,
            {name: (one.shape, one.dtype) for name, one in declared.items()},
        )
    )
    if reason is not None:
        return reason
    checks = list(_value_checks(update, job.state, declared))
    # All results at once: asking one by one would wait for a GPU once per tensor.
    device = next(iter(update.params.values())).device if update.params else torch.device("cpu")
    passed = [result.view(-1).to(device, non_blocking=True) for _, result in checks]
    found = torch.cat(passed).tolist() if passed else []
    reasons = [reason for several, _ in checks for reason in several]
    for reason, good in zip(reasons, found, strict=True):
        if not good:
            return reason
    if not abs(update.train_loss or 0.0) <= LARGEST_STATISTIC:
        return "its training loss is NaN, infinite or implausibly large"
    return None


def _reason_by_claims(update: ClientUpdate, job: LocalJob) -> str | None:
    number, epochs = job.batches.num_examples, job.batches.epochs
    if update.client != job.client:
        return f"the update is of client {update.client}"
    if update.num_examples != number:
        return f"it claims {update.num_examples} samples; it has {number}"
    if not 0 <= update.epochs_done <= epochs:
        return f"it claims {update.epochs_done} epochs of {epochs}"
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
    """Reasons to reject updates that differ too much from the cohort, by client.

    Finite numbers can still be absurd, and the cohort tells: clients that received the same weights
    do not move a thousand times as far as most of them.
    """
    norm_k = update_norms(sent, updates) if updates else torch.empty(0)
    moved_k = norm_k[norm_k > 0]
    if len(moved_k) < FEWEST:
        return {}
    median, times = float(moved_k.median()), OUTLIER if times is None else times
    return {
        update.client: f"its update is {norm / median:.3g} times as long as the cohort's median"
        for update, norm in zip(updates, norm_k.tolist(), strict=True)
        if not norm <= times * median
    }


def _value_checks(
    update: ClientUpdate, sent: ServerState, declared: Declarations
) -> Iterator[tuple[list[str], Tensor]]:
    """Checks of the values: the message of each, and whether it passes."""
    largest = ServerState(sent.round, update.params, {}).largest
    if largest:
        before = torch.stack([sent.largest[name] for name in largest]).double()
        yield (
            [
                f"parameter '{name}' is NaN, infinite or implausibly large after local training"
                " (learning rate too high?)"
                for name in largest
            ],
            torch.stack([*largest.values()]).double() <= LARGEST_GROWTH * (1 + before),
        )
    for name, tensor in update.buffers.items():
        if tensor.is_floating_point():
            low = 0.0 if name.endswith("running_var") else -LARGEST_STATISTIC
            yield (
                [f"buffer '{name}' is not within [{low:g}, {LARGEST_STATISTIC:g}]"],
                _within(tensor, low, LARGEST_STATISTIC),
            )
    for name, one in declared.items():
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


def _within(tensor: Tensor, low: float, high: float) -> Tensor:
    """Whether all values lie in a range; false for NaN."""
    if not tensor.numel():
        return torch.ones((), dtype=torch.bool, device=tensor.device)
    # One pass that writes nothing, however large the model.
    smallest, largest = tensor.aminmax()
    return (smallest >= low) & (largest <= high)
