"""The only round loop: every strategy, every engine, one run or a whole sweep.

Each pass plans a round for every unfinished run, trains all their jobs as one flat list, lets each
strategy weigh and combine its updates, tests the new models and yields one record per run.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from fedproto.config import RunConfig
from fedproto.data.federation import Federation
from fedproto.engines.base import Engine
from fedproto.errors import ConfigError
from fedproto.measures.base import MEASURES, Gauge, Taken
from fedproto.rounds.guard import Expected, outliers, reason_to_refuse
from fedproto.rounds.planning import RoundPlan, check_fits, equip, plan_round, remember_all
from fedproto.rounds.runs import Run
from fedproto.strategies.contract import Setting
from fedproto.types import (
    POOLED,
    ClientFailure,
    ClientUpdate,
    RoundRecord,
    ServerState,
    num_bytes,
)


class Watcher:
    """Is told how far things are; does nothing unless overridden."""

    def round_started(self, num_jobs: int) -> None:
        """A pass over all runs begins, with so many jobs."""

    def job_done(self) -> None:
        """A job is finished."""

    def notice(self, text: str) -> None:
        """Something about how jobs are run that a user should know, in a sentence."""

    def round_done(self, run: Run, record: RoundRecord) -> None:
        """A run's round is finished and, where it is kept, safely on disk."""


def run_rounds(
    runs: Sequence[Run],
    federation: Federation,
    engine: Engine,
    watcher: Watcher | None = None,
    gauge: Gauge | None = None,
) -> Iterator[tuple[Run, RoundRecord]]:
    """Goes on with all runs until each is over.

    Args:
        runs: The runs of a sweep; updated in place before each yield.
        federation: The clients' data, shared by all runs.
        engine: Trains and tests.
        watcher: Is told of rounds begun and jobs done.
        gauge: Takes the measures; one that compares with no other run by default.

    Yields:
        A run and its new record, round by round.
    """
    watcher = watcher or Watcher()
    for run in runs:
        check_fits(run.config, federation)
    gauge = gauge or Gauge(engine.workload)
    for run in runs:
        _prepare_measures(run, engine, gauge)
    setting = remember_all(runs, engine)
    while active := [run for run in runs if run.stop_reason is None]:
        started = time.perf_counter()
        plans = [equip(plan_round(run, federation), run, setting, engine) for run in active]
        jobs = [job for plan in plans for job in plan.jobs]
        watcher.round_started(len(jobs))
        results = iter(engine.train(jobs, watcher.job_done))
        outcomes = [
            close_round(run, plan, [next(results) for _ in plan.jobs], setting)
            for run, plan in zip(active, plans, strict=True)
        ]
        states = [state for state, _ in outcomes]
        scores = _evaluate(active, states, federation, engine)
        measured = [
            _measure(run.config, state, gauge) for run, state in zip(active, states, strict=True)
        ]
        incidents = engine.take_incidents()
        seconds = (time.perf_counter() - started) / len(active)
        for run, (state, record), score, taken in zip(
            active, outcomes, scores, measured, strict=True
        ):
            notes = [*([record.note] if record.note else []), *incidents]
            record = replace(
                record,
                metrics=record.metrics | score | taken.metrics,
                tables=taken.tables,
                seconds=seconds,
                note="; ".join(notes) or None,
            )
            run.advance(state, record)
            yield run, record


def close_round(
    run: Run,
    plan: RoundPlan,
    results: Sequence[ClientUpdate | ClientFailure],
    setting: Setting,
) -> tuple[ServerState, RoundRecord]:
    """Weighs and combines a round's updates; the record still lacks scores and time.

    Args:
        run: The run, before the round.
        plan: Who was to do what.
        results: One per job of the plan, in its order.
        setting: What the strategy's declarations depend on.
    """
    config, state = run.config, run.state
    updates, failures = _accepted(plan, results, setting, config.aggregate.drop_beyond)
    combined = _combined(config, state, updates, setting) if updates else None
    if combined is not None:
        next_state, shares = combined
        attention = dict(zip((update.client for update in updates), shares, strict=True))
        note = None
        keep_from = plan.jobs[0].keep_from
        for update in updates:
            if update.memory:
                run.memory.save(update.client, state.round, update.memory, keep_from=keep_from)
    else:
        next_state = replace(state, round=state.round + 1)
        attention = {}
        note = "the model did not move: " + (
            "every client was dropped as a straggler"
            if len(plan.dropped) == len(plan.cohort)
            else "no client sent a usable update"
            if not updates
            else "what the updates combine to is not finite (learning rate too high?)"
        )
    sent = num_bytes(state.params, state.buffers, plan.jobs[0].broadcast if plan.jobs else None)
    return next_state, RoundRecord(
        round=state.round,
        cohort=plan.cohort,
        stragglers=plan.stragglers,
        dropped=plan.dropped,
        epochs={update.client: update.epochs_done for update in updates},
        attention=attention,
        metrics=_update_metrics(config, updates),
        bytes_down=sent * len(plan.cohort),
        bytes_up=sum(
            num_bytes(update.params, update.buffers, update.payload)
            for update in updates
            if update.client != POOLED
        ),
        seconds=0.0,
        failures={failure.client: failure.reason for failure in failures},
        note=note,
    )


def _combined(
    config: RunConfig, state: ServerState, updates: Sequence[ClientUpdate], setting: Setting
) -> tuple[ServerState, list[float]] | None:
    """The next state and each client's share; None when either is no number.

    Every update was usable by itself; still their distances may overflow in an attention, or a
    server's optimizer blow up. Such a round must not spoil the model, nor the record.
    """
    weights = config.strategy.weigh(state, updates)
    combined, counted = config.strategy.aggregate(
        state, updates, weights, setting, config.aggregate
    )
    following = config.server.step(state, combined)
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


def _evaluate(
    runs: Sequence[Run], states: Sequence[ServerState], federation: Federation, engine: Engine
) -> list[dict[str, float]]:
    """Scores per run; empty for a run whose test is not due."""
    tested = [
        place
        for place, (run, state) in enumerate(zip(runs, states, strict=True))
        if state.round % run.config.evaluate.every == 0 or state.round == run.config.schedule.rounds
    ]
    validated = [
        place
        for place in tested
        if len(federation.validation) and _wants_validation(runs[place].config)
    ]
    scores: list[dict[str, float]] = [{} for _ in runs]
    for prefix, due, indices in (
        ("", tested, federation.test_indices),
        ("validation_", validated, federation.validation),
    ):
        metrics = engine.evaluate([states[place] for place in due], indices) if due else []
        for place, values in zip(due, metrics, strict=True):
            scores[place] |= _finite({prefix + name: value for name, value in values.items()})
    return scores


def _prepare_measures(run: Run, engine: Engine, gauge: Gauge) -> None:
    """Finds out before any training whether a run's measures can be taken."""
    options = run.config.measure
    if options.every == 0 or run.stop_reason is not None:
        return
    if not engine.holds_data:
        raise ConfigError(
            "measures need the clients' data, which stays with the clients over Flower; set"
            " measure.every = 0, or flower.evaluate_on = 'server' where the server has the data"
        )
    gauge.prepare(options, run.config.seed)


def _measure(config: RunConfig, state: ServerState, gauge: Gauge) -> Taken:
    """What a run asks to be measured of its new model; nothing when it is not due."""
    if not config.measure.due(state.round, config.schedule.rounds):
        return Taken()
    return gauge.take(config.measure, config.seed, state)


def _wants_validation(config: RunConfig) -> bool:
    stops_early = config.stop.target is not None or config.stop.patience is not None
    return config.evaluate.validation or stops_early


def _update_metrics(config: RunConfig, updates: Sequence[ClientUpdate]) -> dict[str, float]:
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
    return _finite(metrics)


def _finite(metrics: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if math.isfinite(value)}
