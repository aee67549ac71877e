"""The only round loop: every strategy, every engine, one run or a whole sweep.

Each pass plans a round for every unfinished run, trains all their jobs as one flat list, combines
the updates of each run, tests the new models and yields one record per run.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from fedproto.config import RunConfig
from fedproto.disk.files import at_once
from fedproto.engines.base import Engine
from fedproto.errors import ConfigError, unknown_name
from fedproto.measures import MEASURES, MeasureOptions, Meter
from fedproto.measures.base import finite
from fedproto.measures.scores import PER_CLIENT
from fedproto.rounds.aggregate import RoundOutcome, aggregate_round
from fedproto.rounds.evaluate import SERVED, evaluate_round, finetuned_scores, models_to_test
from fedproto.rounds.identity import reference_state
from fedproto.rounds.jobs import RoundPlan, check_fits, plan_round, prepare
from fedproto.strategies.values import Setting
from fedproto.types import (
    POOLED,
    ClientFailure,
    ClientUpdate,
    RoundRecord,
    ServerState,
    Updates,
    num_bytes,
    under,
)

if TYPE_CHECKING:
    from fedproto.rounds.run import Run


def run_rounds(runs: Sequence[Run], engine: Engine) -> Iterator[tuple[Run, RoundRecord]]:
    """Runs rounds until every run has finished.

    Yields:
        A run and its new record, round by round.
    """
    meter = Meter(engine.workload, reference_state)
    for run in runs:
        check_fits(run.config, engine.workload.federation)
        _prepare_measures(run, engine, meter)
    setting = prepare(runs, engine)
    while active := [run for run in runs if run.stop_reason is None]:
        yield from _run_round(active, engine, meter, setting)


def _run_round(
    runs: Sequence[Run], engine: Engine, meter: Meter, setting: Setting
) -> Iterator[tuple[Run, RoundRecord]]:
    """One round of every run."""
    started = time.perf_counter()
    federation = engine.workload.federation
    plans = [
        plan_round(run, federation, setting, clients_remember=engine.clients_remember)
        for run in runs
    ]
    jobs = [job for plan in plans for job in plan.jobs]
    engine.workload.callback.on_pass(len(jobs))
    results = iter(engine.train(jobs))
    by_run = [[next(results) for _ in plan.jobs] for plan in plans]
    outcomes = [
        finish_round(run, plan, own, setting)
        for run, plan, own in zip(runs, plans, by_run, strict=True)
    ]
    usable = {update.client for each in outcomes for update in each.updates}
    failed = {client: why for each in outcomes for client, why in each.failures.items()}
    engine.judged(usable, {one: why for one, why in failed.items() if one not in usable})
    states = [outcome.state for outcome in outcomes]
    scores = evaluate_round(runs, states, engine, setting)
    incidents = engine.take_incidents()
    seconds = time.perf_counter() - started
    parts = zip(runs, plans, outcomes, scores, _time_shares(by_run), strict=True)
    for run, plan, outcome, score, share in parts:
        began, options = time.perf_counter(), run.config.measure
        record = _record(run, plan, outcome, score)
        if options.due(outcome.state.round, run.config.schedule.rounds):
            _measure(run, outcome.state, record, meter, options)
        if run.config.evaluate.test and run.config.stop_reason([*run.records, record]) is not None:
            record.metrics.update(finetuned_scores(run, outcome.state.served, engine))
            if engine.holds_data and PER_CLIENT not in record.tables:
                _measure(run, outcome.state, record, meter, MeasureOptions(what=("clients",)))
        spent = seconds * share + time.perf_counter() - began
        notes = [*([outcome.note] if outcome.note else []), *incidents]
        record = replace(record, seconds=spent, note="; ".join(notes) or None)
        _check_stop(run, record)
        run.add(outcome.state, record)
        engine.workload.callback.on_round(run.config, record)
        yield run, record


def _measure(
    run: Run, state: ServerState, record: RoundRecord, meter: Meter, options: MeasureOptions
) -> None:
    """Adds measures of every tested model to the round's record."""
    for name, model in models_to_test(run, state).items():
        taken = meter.take(options, run.config.seed, model)
        served = name == SERVED
        (record.metrics if served else record.also[name]).update(taken.metrics)
        record.tables.update(taken.tables if served else under(name, taken.tables))


def finish_round(
    run: Run, plan: RoundPlan, results: Sequence[ClientUpdate | ClientFailure], setting: Setting
) -> RoundOutcome:
    """Combines a round's updates and keeps the clients' memory."""
    jobs = zip(plan.jobs, results, strict=True)
    outcome = aggregate_round(run.config.method, run.state, list(jobs), setting)
    kept = [update for update in outcome.updates if update.memory and outcome.attention]

    def keep(update: ClientUpdate) -> None:
        run.memory.save(
            update.client, run.state.round, update.memory, keep_from=plan.jobs[0].keep_from
        )

    run.last_round |= dict.fromkeys(outcome.attention, run.state.round)
    at_once(keep, kept)
    if not plan.jobs and plan.cohort:
        note = "the model did not move: every client was dropped as a straggler"
        outcome = replace(outcome, note=note)
    return outcome


def _record(
    run: Run, plan: RoundPlan, outcome: RoundOutcome, scores: Mapping[str, dict[str, float]]
) -> RoundRecord:
    """The line of ``rounds.jsonl``."""
    sent = run.state
    broadcast = plan.jobs[0].broadcast if plan.jobs else None
    return RoundRecord(
        round=sent.round,
        cohort=plan.cohort,
        stragglers=plan.stragglers,
        dropped=plan.dropped,
        epochs={update.client: update.epochs_done for update in outcome.updates},
        attention=outcome.attention,
        metrics={**_update_metrics(run.config, outcome.updates), **scores[SERVED]},
        bytes_down=num_bytes(sent.params, sent.buffers, broadcast) * len(plan.cohort),
        bytes_up=sum(
            num_bytes(update.params, update.buffers, update.payload)
            for update in outcome.updates
            if update.client != POOLED
        ),
        seconds=0.0,
        failures=outcome.failures,
        also={name: dict(found) for name, found in scores.items() if name != SERVED},
    )


def _update_metrics(config: RunConfig, updates: Updates) -> dict[str, float]:
    """Means over the updates, and the strategy's own numbers unless a measure gives the same."""
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


def _time_shares(by_run: Sequence[Sequence[ClientUpdate | ClientFailure]]) -> list[float]:
    """Each run's share of a round's time: by the time its jobs took, equal where one is unknown."""
    spent = [sum(one.seconds for one in own if isinstance(one, ClientUpdate)) for own in by_run]
    if not all(spent):
        return [1 / len(by_run)] * len(by_run)
    return [own / sum(spent) for own in spent]


def _prepare_measures(run: Run, engine: Engine, meter: Meter) -> None:
    """Checks before any training that a run's measures and fine-tuning are possible."""
    options, epochs = run.config.measure, run.config.evaluate.finetune_epochs
    if not (options.every or epochs) or run.stop_reason is not None:
        return
    if not engine.holds_data:
        raise ConfigError(
            f"{'measures need' if options.every else 'fine-tuning needs'} the clients' data, which"
            " stays with the clients over Flower; set measure.every = 0 and"
            " evaluate.finetune_epochs = 0, or flower.evaluate_on = 'server' where the server has"
            " the data"
        )
    if options.every:
        meter.prepared(options, run.config.seed)


def _check_stop(run: Run, record: RoundRecord) -> None:
    """Checks that the metric a run is to stop by is among those taken, once each was due."""
    config, records = run.config, (*run.records, record)
    due = min(config.schedule.rounds, max(config.evaluate.every, config.measure.every))
    name, tested = config.stop.metric, {"loss", "validation_loss"} & record.metrics.keys()
    if name is None or not tested or len(records) < due:
        return
    if not any({name, f"validation_{name}"} & one.metrics.keys() for one in records):
        known = {key for one in records for key in one.metrics}
        raise ConfigError(f"stop.metric: {unknown_name('metric', name, known)}")
