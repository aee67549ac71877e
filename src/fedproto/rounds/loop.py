"""The only round loop: every strategy, every engine, one run or a whole sweep.

Each pass plans a round for every unfinished run, trains all their jobs as one flat list, combines
the updates of each run, tests the new models and yields one record per run.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from fedproto.config import RunConfig
from fedproto.data.federation import Federation
from fedproto.engines.base import Engine
from fedproto.errors import ConfigError
from fedproto.measures import MEASURES
from fedproto.measures.base import Gauge, Taken
from fedproto.measures.scores import PER_CLIENT
from fedproto.rounds.aggregate import Expected, RoundOutcome, aggregate_round
from fedproto.rounds.personal import finetuned_scores, personal_scores
from fedproto.rounds.planning import RoundPlan, check_fits, plan_round, remember_all
from fedproto.rounds.runs import Run, reason_to_end
from fedproto.strategies.base import Setting
from fedproto.types import (
    POOLED,
    ClientFailure,
    ClientUpdate,
    RoundRecord,
    ServerState,
    Updates,
    num_bytes,
)


class Watcher:
    """Progress callback; forwards each event to another one where given."""

    _then: Watcher | None = None

    def __init__(self, then: Watcher | None = None) -> None:
        self._then = then

    def round_started(self, num_jobs: int) -> None:
        """A pass over all runs begins, with so many jobs."""
        if self._then is not None:
            self._then.round_started(num_jobs)

    def job_done(self) -> None:
        """A job is finished."""
        if self._then is not None:
            self._then.job_done()

    def notice(self, text: str) -> None:
        """Something about how jobs are run that a user should know, in a sentence."""
        if self._then is not None:
            self._then.notice(text)

    def round_done(self, config: RunConfig, records: Sequence[RoundRecord]) -> None:
        """A run's round is finished and, where it is kept, safely on disk."""
        if self._then is not None:
            self._then.round_done(config, records)


def run_rounds(
    runs: Sequence[Run],
    federation: Federation,
    engine: Engine,
    watcher: Watcher | None = None,
    gauge: Gauge | None = None,
) -> Iterator[tuple[Run, RoundRecord]]:
    """Runs rounds until every run has finished.

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
        plans = [
            plan_round(run, federation, setting, clients_remember=engine.clients_remember)
            for run in active
        ]
        jobs = [job for plan in plans for job in plan.jobs]
        watcher.round_started(len(jobs))
        results = iter(engine.train(jobs, watcher.job_done))
        by_run = [[next(results) for _ in plan.jobs] for plan in plans]
        outcomes = [
            finish_round(run, plan, own, setting)
            for run, plan, own in zip(active, plans, by_run, strict=True)
        ]
        usable = {update.client for each in outcomes for update in each.updates}
        failed = {client: why for each in outcomes for client, why in each.failures.items()}
        engine.judged(usable, {one: why for one, why in failed.items() if one not in usable})
        states = [each.state.served for each in outcomes]
        scores = _evaluate(active, states, federation, engine)
        for run, outcome, score in zip(active, outcomes, scores, strict=True):
            last = {**run.last_round, **dict.fromkeys(outcome.attention, run.state.round)}
            served = outcome.state.served
            if score:
                score |= personal_scores(run, served, last, federation, engine, setting)
            if served.round == run.config.schedule.rounds:
                score |= finetuned_scores(run, served, last, federation, engine)
        measured = [
            _measure(run.config, state, gauge) for run, state in zip(active, states, strict=True)
        ]
        incidents = engine.take_incidents()
        seconds = time.perf_counter() - started
        parts = zip(active, plans, outcomes, scores, measured, _time_shares(by_run), strict=True)
        for run, plan, outcome, score, taken, share in parts:
            record = _record(run, plan, outcome, {**finite(score), **taken.metrics})
            notes = [*([outcome.note] if outcome.note else []), *incidents]
            record = replace(
                record, seconds=seconds * share, tables=taken.tables, note="; ".join(notes) or None
            )
            ends = reason_to_end(run.config, [*run.records, record]) is not None
            if ends and engine.holds_data and PER_CLIENT not in record.tables:
                final = gauge.score_clients(run.config.seed, outcome.state.served)
                record.metrics.update(final.metrics)
                record.tables.update(final.tables)
            run.advance(outcome.state, record)
            yield run, record


def finish_round(
    run: Run, plan: RoundPlan, results: Sequence[ClientUpdate | ClientFailure], setting: Setting
) -> RoundOutcome:
    """Combines a round's updates and keeps the clients' memory."""
    expected = [Expected.of(job, setting) for job in plan.jobs]
    outcome = aggregate_round(
        run.config.method, run.state, list(zip(expected, results, strict=True)), setting
    )
    kept = [update for update in outcome.updates if update.memory and outcome.attention]

    def keep(update: ClientUpdate) -> None:
        run.memory.save(
            update.client, run.state.round, update.memory, keep_from=plan.jobs[0].keep_from
        )

    if kept:
        with ThreadPoolExecutor(min(len(kept), 8)) as pool:  # a disk answers late
            list(pool.map(keep, kept))
    roster = plan.roster
    if not plan.jobs and roster.cohort:
        note = "the model did not move: every client was dropped as a straggler"
        outcome = replace(outcome, note=note)
    return outcome


def _record(
    run: Run, plan: RoundPlan, outcome: RoundOutcome, scores: Mapping[str, float]
) -> RoundRecord:
    """The line of ``rounds.jsonl``."""
    roster, sent = plan.roster, run.state
    broadcast = plan.jobs[0].broadcast if plan.jobs else None
    return RoundRecord(
        round=sent.round,
        cohort=roster.cohort,
        stragglers=roster.stragglers,
        dropped=roster.dropped,
        epochs={update.client: update.epochs_done for update in outcome.updates},
        attention=outcome.attention,
        metrics={**_update_metrics(run.config, outcome.updates), **scores},
        bytes_down=num_bytes(sent.params, sent.buffers, broadcast) * len(roster.cohort),
        bytes_up=sum(
            num_bytes(update.params, update.buffers, update.payload)
            for update in outcome.updates
            if update.client != POOLED
        ),
        seconds=0.0,
        failures=outcome.failures,
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


def finite(metrics: Mapping[str, float]) -> dict[str, float]:
    """The metrics that are finite."""
    return {name: value for name, value in metrics.items() if math.isfinite(value)}


def _time_shares(by_run: Sequence[Sequence[ClientUpdate | ClientFailure]]) -> list[float]:
    """Each run's share of a round's time: by the time its jobs took, equal where one is unknown."""
    spent = [sum(one.seconds for one in own if isinstance(one, ClientUpdate)) for own in by_run]
    if not all(spent):
        return [1 / len(by_run)] * len(by_run)
    return [own / sum(spent) for own in spent]


def _evaluate(
    runs: Sequence[Run], states: Sequence[ServerState], federation: Federation, engine: Engine
) -> list[dict[str, float]]:
    """Scores per run; empty for a run whose test is not due."""
    tested = [
        index
        for index, (run, state) in enumerate(zip(runs, states, strict=True))
        if state.round % run.config.evaluate.every == 0 or state.round == run.config.schedule.rounds
    ]
    validated = [
        index
        for index in tested
        if len(federation.validation) and _wants_validation(runs[index].config)
    ]
    scores: list[dict[str, float]] = [{} for _ in runs]
    for prefix, due, indices in (
        ("", tested, federation.test_indices),
        ("validation_", validated, federation.validation),
    ):
        metrics = engine.evaluate([states[index] for index in due], indices) if due else []
        for index, values in zip(due, metrics, strict=True):
            scores[index] |= {prefix + name: value for name, value in values.items()}
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
