"""The end of a round: which updates count, what they become, and all that is said of them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import torch

from fedproto.config import RunConfig
from fedproto.measures import MEASURES
from fedproto.measures.base import Taken
from fedproto.rounds.guard import Expected, outliers, reason_to_refuse
from fedproto.rounds.planning import RoundPlan
from fedproto.rounds.runs import Run
from fedproto.strategies.contract import Setting
from fedproto.types import (
    POOLED,
    ClientFailure,
    ClientUpdate,
    RoundRecord,
    ServerState,
    Updates,
    num_bytes,
)


@dataclass(frozen=True)
class ClosedRound:
    """A round whose updates are weighed and combined, and whose model is not tested yet.

    The state that was sent is the one that clients began from; all else is as in the record.
    """

    plan: RoundPlan
    sent: ServerState
    state: ServerState
    epochs: dict[int, int]
    attention: dict[int, float]
    failures: dict[int, str]
    metrics: Mapping[str, float]
    bytes_up: int
    note: str | None

    def record(
        self, scores: Mapping[str, float], taken: Taken, incidents: Iterable[str], seconds: float
    ) -> RoundRecord:
        """The line of ``rounds.jsonl``."""
        plan, broadcast = self.plan, self.plan.jobs[0].broadcast if self.plan.jobs else None
        return RoundRecord(
            round=self.sent.round,
            cohort=plan.cohort,
            stragglers=plan.stragglers,
            dropped=plan.dropped,
            epochs=self.epochs,
            attention=self.attention,
            metrics={**self.metrics, **finite(scores), **taken.metrics},
            bytes_down=num_bytes(self.sent.params, self.sent.buffers, broadcast) * len(plan.cohort),
            bytes_up=self.bytes_up,
            seconds=seconds,
            failures=self.failures,
            note="; ".join([*([self.note] if self.note else []), *incidents]) or None,
            tables=taken.tables,
        )


def close_round(
    run: Run, plan: RoundPlan, results: Sequence[ClientUpdate | ClientFailure], setting: Setting
) -> ClosedRound:
    """Weighs and combines a round's updates, and keeps what clients remember."""
    config, state = run.config, run.sent
    updates, failures = _accepted(plan, results, setting, config.aggregate.drop_beyond)
    combined = _combined(config, state, updates, setting) if updates else None
    if combined is not None:
        next_state, shares = combined
        attention = dict(zip((update.client for update in updates), shares, strict=True))
        note = None
        _remember(run, updates, plan.jobs[0].keep_from)
    else:
        next_state = replace(run.state, round=state.round + 1)
        attention = {}
        note = "the model did not move: " + (
            "every client was dropped as a straggler"
            if len(plan.dropped) == len(plan.cohort)
            else "no client sent a usable update"
            if not updates
            else "what the updates combine to is not finite (learning rate too high?)"
        )
    return ClosedRound(
        plan=plan,
        sent=state,
        state=next_state,
        epochs={update.client: update.epochs_done for update in updates},
        attention=attention,
        failures={failure.client: failure.reason for failure in failures},
        metrics=_update_metrics(config, updates),
        bytes_up=sum(
            num_bytes(update.params, update.buffers, update.payload)
            for update in updates
            if update.client != POOLED
        ),
        note=note,
    )


def _remember(run: Run, updates: Sequence[ClientUpdate], keep_from: int) -> None:
    """Keeps what clients remember; side by side, because a disk answers late."""

    def keep(update: ClientUpdate) -> None:
        run.memory.save(update.client, run.state.round, update.memory, keep_from=keep_from)

    kept = [update for update in updates if update.memory]
    if kept:
        with ThreadPoolExecutor(min(len(kept), 8)) as pool:
            list(pool.map(keep, kept))


def _combined(
    config: RunConfig, state: ServerState, updates: Updates, setting: Setting
) -> tuple[ServerState, list[float]] | None:
    """The next state and each client's share; None when either is no number.

    Every update was usable by itself; still their distances may overflow in an attention, or a
    server's optimizer blow up. Such a round must not spoil the model, nor the record.
    """
    weights = config.strategy.weigh(state, updates)
    combined, counted = config.strategy.aggregate(
        state, updates, weights, setting, config.aggregate
    )
    following = config.strategy.served(config.server.step(state, combined), state, setting)
    tensors = {**following.params, **following.buffers, **following.memory}
    # All verdicts at once and in one place: memory may lie elsewhere than the model.
    device = next(iter(tensors.values())).device if tensors else torch.device("cpu")
    finite = [
        torch.isfinite(one).all().to(device, non_blocking=True)
        for one in tensors.values()
        if one.is_floating_point()
    ]
    sound = bool(torch.isfinite(counted).all()) and (not finite or bool(torch.stack(finite).all()))
    return (following, counted.tolist()) if sound else None


def _accepted(
    plan: RoundPlan,
    results: Sequence[ClientUpdate | ClientFailure],
    setting: Setting,
    drop_beyond: float | None,
) -> tuple[list[ClientUpdate], list[ClientFailure]]:
    """The updates that may enter the average, by client, and why others may not."""
    updates: list[ClientUpdate] = []
    failures = [result for result in results if isinstance(result, ClientFailure)]
    for job, result in zip(plan.jobs, results, strict=True):
        if isinstance(result, ClientFailure):
            continue
        reason = reason_to_refuse(result, Expected.of(job, setting))
        if reason is None:
            updates.append(result)
        else:
            failures.append(ClientFailure(job.client, reason))
    sent = plan.jobs[0].state.params if plan.jobs else {}
    apart = outliers(updates, sent, drop_beyond)
    failures += [ClientFailure(client, reason) for client, reason in apart.items()]
    kept = [update for update in updates if update.client not in apart]
    return sorted(kept, key=lambda update: update.client), failures


def _update_metrics(config: RunConfig, updates: Updates) -> dict[str, float]:
    """Means over the updates, and what the strategy adds unless a measure gives the same."""
    trained = [update for update in updates if update.train_loss is not None]
    metrics = {}
    if trained:
        total = sum(update.num_examples for update in trained)
        metrics["train_loss"] = (
            sum(update.num_examples * (update.train_loss or 0.0) for update in trained) / total
        )
    if updates:
        measured = {
            metric
            for name in config.measure.what
            if config.measure.takes(name)
            for metric in MEASURES.get(name).stands_for
        }
        own = config.strategy.metrics(updates)
        metrics |= {name: value for name, value in own.items() if name not in measured}
    return finite(metrics)


def finite(metrics: Mapping[str, float]) -> dict[str, float]:
    """Those of some metrics that are numbers."""
    return {name: value for name, value in metrics.items() if math.isfinite(value)}
