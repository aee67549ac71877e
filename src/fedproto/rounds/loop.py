"""The only round loop: every strategy, every engine, one run or a whole sweep.

Each pass plans a round for every unfinished run, trains all their jobs as one flat list, lets each
strategy weigh and combine its updates, tests the new models and yields one record per run.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from fedproto.config import RunConfig
from fedproto.data.federation import Federation
from fedproto.engines.base import Engine
from fedproto.errors import ConfigError
from fedproto.measures.base import Gauge, Taken
from fedproto.measures.clients import PER_CLIENT
from fedproto.rounds.closing import close_round
from fedproto.rounds.planning import check_fits, equip, plan_round, remember_all
from fedproto.rounds.runs import Run, reason_to_end
from fedproto.types import ClientFailure, ClientUpdate, RoundRecord, ServerState


class Watcher:
    """Is told how far things are, and passes it on to another watcher if there is one."""

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
    """Goes on with all runs until each is over.

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
        by_run = [[next(results) for _ in plan.jobs] for plan in plans]
        closed = [
            close_round(run, plan, own, setting)
            for run, plan, own in zip(active, plans, by_run, strict=True)
        ]
        usable = {client for each in closed for client in each.epochs}
        failed = {client: why for each in closed for client, why in each.failures.items()}
        engine.judged(usable, {one: why for one, why in failed.items() if one not in usable})
        states = [each.state for each in closed]
        scores = _evaluate(active, states, federation, engine)
        measured = [
            _measure(run.config, state, gauge) for run, state in zip(active, states, strict=True)
        ]
        incidents = engine.take_incidents()
        seconds = time.perf_counter() - started
        parts = zip(active, closed, scores, measured, _time_shares(by_run), strict=True)
        for run, each, score, taken, share in parts:
            record = each.record(score, taken, incidents, seconds * share)
            ends = reason_to_end(run.config, [*run.records, record]) is not None
            if ends and engine.holds_data and PER_CLIENT not in record.tables:
                final = gauge.score_clients(run.config.seed, each.state)
                record.metrics.update(final.metrics)
                record.tables.update(final.tables)
            run.advance(each.state, record)
            yield run, record


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
