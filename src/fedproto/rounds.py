"""The only round loop: every strategy, every engine, one run or a whole sweep.

Each pass plans a round for every unfinished run, trains all their jobs as one flat list, lets each
strategy weigh and combine its updates, tests the new models and yields one record per run.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from fedproto import schedule
from fedproto.config import RunConfig, StopOptions
from fedproto.data.federation import Federation
from fedproto.engines.base import Engine
from fedproto.equations import aggregate_mean_margin
from fedproto.errors import ConfigError
from fedproto.guard import FeatureShape, feature_shape, reason_to_refuse
from fedproto.measures.base import Gauge
from fedproto.measures.reference import check_reference
from fedproto.rng import Purpose, torch_seed
from fedproto.tasks import headline, lower_is_better
from fedproto.types import (
    POOLED,
    ClientFailure,
    ClientUpdate,
    LocalJob,
    Prototypes,
    RoundRecord,
    ServerState,
    num_bytes,
)


@dataclass
class Run:
    """A run in progress.

    Attributes:
        config: What it does.
        state: Where it stands.
        records: The rounds done, oldest first.
    """

    config: RunConfig
    state: ServerState
    records: list[RoundRecord] = field(default_factory=list)

    @property
    def stop_reason(self) -> str | None:
        """Why the run is over; None while it is not."""
        rounds = self.config.schedule.rounds
        if self.state.round >= rounds:
            return f"all {rounds} rounds done"
        return stop_reason(self.config.stop, self.records)


@dataclass(frozen=True)
class RoundPlan:
    """Who does what in a round."""

    cohort: list[int]
    stragglers: list[int]
    dropped: list[int]
    jobs: list[LocalJob]


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
    runs: Sequence[Run], federation: Federation, engine: Engine, watcher: Watcher | None = None
) -> Iterator[tuple[Run, RoundRecord]]:
    """Goes on with all runs until each is over.

    Args:
        runs: The runs of a sweep; updated in place before each yield.
        federation: The clients' data, shared by all runs.
        engine: Trains and tests.
        watcher: Is told of rounds begun and jobs done.

    Yields:
        A run and its new record, round by round.
    """
    watcher = watcher or Watcher()
    for run in runs:
        check_fits(run.config, federation)
    features = feature_shape(engine.workload)
    gauge = Gauge(engine.workload)
    for run in runs:
        _prepare_measures(run, engine, gauge)
    while active := [run for run in runs if run.stop_reason is None]:
        started = time.perf_counter()
        plans = [plan_round(place, run, federation) for place, run in enumerate(active)]
        jobs = [job for plan in plans for job in plan.jobs]
        watcher.round_started(len(jobs))
        results = iter(engine.train(jobs, watcher.job_done))
        outcomes = [
            close_round(run, plan, [next(results) for _ in plan.jobs], features)
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
                metrics=record.metrics | score | taken,
                seconds=seconds,
                note="; ".join(notes) or None,
            )
            run.state = state
            run.records.append(record)
            yield run, record


def check_fits(config: RunConfig, federation: Federation) -> None:
    """Checks that a configuration can run on a federation.

    Raises:
        ConfigError: If the cohort is larger than the federation.
    """
    if config.schedule.cohort > len(federation.clients):
        raise ConfigError(
            f"schedule.cohort must be at most {len(federation.clients)}, the number of clients in"
            f" {federation.name}, not {config.schedule.cohort}"
        )


def plan_round(place: int, run: Run, federation: Federation) -> RoundPlan:
    """Cohort, stragglers and jobs of a run's next round."""
    config, round_ = run.config, run.state.round
    options, strategy, seed = config.train, config.strategy, config.seed
    sizes = federation.train_sizes
    cohort = schedule.cohort(seed, round_, sizes, config.schedule.cohort, strategy.sampling)

    def job(client: int, num_examples: int, epochs: int, max_steps: int = 0) -> LocalJob:
        return LocalJob(
            run=place,
            client=client,
            state=run.state,
            strategy=strategy,
            batches=schedule.BatchOrder(
                seed, round_, client, num_examples, options.batch_size, epochs, max_steps
            ),
            train=options,
            augment=config.augmentation,
            lr=options.lr_at(round_, config.schedule.rounds),
            seed=torch_seed(seed, Purpose.INSIDE_MODEL, round_, client),
        )

    if strategy.pooled:
        budget = sum(
            job(client, int(sizes[client]), options.epochs).batches.steps for client in cohort
        )
        total = int(sizes.sum())
        epochs = math.ceil(budget / math.ceil(total / options.batch_size))
        return RoundPlan([], [], [], [job(POOLED, total, epochs, budget)])

    slow = schedule.stragglers(seed, round_, cohort, config.schedule.delta)
    dropped = [] if strategy.tolerate_partial_work else slow
    epochs_of = {
        client: schedule.partial_epochs(seed, round_, client, options.epochs)
        if client in slow
        else options.epochs
        for client in cohort
    }
    jobs = [
        job(client, int(sizes[client]), epochs_of[client])
        for client in cohort
        if client not in dropped
    ]
    return RoundPlan(cohort, slow, dropped, jobs)


def close_round(
    run: Run,
    plan: RoundPlan,
    results: Sequence[ClientUpdate | ClientFailure],
    features: FeatureShape | None = None,
) -> tuple[ServerState, RoundRecord]:
    """Weighs and combines a round's updates; the record still lacks scores and time.

    Args:
        run: The run, before the round.
        plan: Who was to do what.
        results: One per job of the plan, in its order.
        features: What prototypes must look like, where that is known.
    """
    strategy, state = run.config.strategy, run.state
    failures = [result for result in results if isinstance(result, ClientFailure)]
    updates = []
    for job, result in zip(plan.jobs, results, strict=True):
        if isinstance(result, ClientFailure):
            continue
        reason = reason_to_refuse(result, job, features)
        if reason is None:
            updates.append(result)
        else:
            failures.append(ClientFailure(job.client, reason))
    updates.sort(key=lambda update: update.client)

    if updates:
        weights = strategy.weigh(state, updates)
        next_state = strategy.aggregate(state, updates, weights)
        attention = dict(
            zip((update.client for update in updates), weights.client.tolist(), strict=True)
        )
        note = None
    else:
        next_state = replace(state, round=state.round + 1)
        attention = {}
        note = "the model did not move: " + (
            "every client was dropped as a straggler"
            if len(plan.dropped) == len(plan.cohort)
            else "no client sent a usable update"
        )
    sent = num_bytes(state.params, state.buffers)
    return next_state, RoundRecord(
        round=state.round,
        cohort=plan.cohort,
        stragglers=plan.stragglers,
        dropped=plan.dropped,
        epochs={update.client: update.epochs_done for update in updates},
        attention=attention,
        metrics=_update_metrics(updates, margin=not run.config.measure.takes("margin")),
        bytes_down=sent * len(plan.cohort),
        bytes_up=sum(_bytes_up(update) for update in updates if update.client != POOLED),
        seconds=0.0,
        failures={failure.client: failure.reason for failure in failures},
        note=note,
    )


def stop_reason(options: StopOptions, records: Sequence[RoundRecord]) -> str | None:
    """Why to stop after these rounds, by target or patience; None to go on."""
    if options.target is None and options.patience is None:
        return None
    name = options.metric or headline(metric for record in records for metric in record.metrics)
    if any(f"validation_{name}" in record.metrics for record in records):
        name = f"validation_{name}"
    values = [record.metrics[name] for record in records if name in record.metrics]
    if not values:
        return None
    lower = lower_is_better(name)
    best = min(values) if lower else max(values)
    reached = options.target is not None and (
        best <= options.target if lower else best >= options.target
    )
    if reached:
        return f"{name} reached the target {options.target:g}"
    if options.patience is not None and len(values) - 1 - values.index(best) >= options.patience:
        return f"no better {name} in {options.patience} tests"
    return None


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
    caution = check_reference(run.config)
    if caution is not None:
        engine.workload.notify(caution)
    gauge.prepare(options, run.config.seed)


def _measure(config: RunConfig, state: ServerState, gauge: Gauge) -> dict[str, float]:
    """What a run asks to be measured of its new model; nothing when it is not due."""
    if not config.measure.due(state.round, config.schedule.rounds):
        return {}
    return gauge.take(config.measure, config.seed, state)


def _wants_validation(config: RunConfig) -> bool:
    stops_early = config.stop.target is not None or config.stop.patience is not None
    return config.evaluate.validation or stops_early


def _update_metrics(updates: Sequence[ClientUpdate], *, margin: bool) -> dict[str, float]:
    """Means over the updates; the cohort's margin only where no measure of that name is taken."""
    trained = [update for update in updates if update.train_loss is not None]
    metrics = {}
    if trained:
        total = sum(update.num_examples for update in trained)
        metrics["train_loss"] = (
            sum(update.num_examples * (update.train_loss or 0.0) for update in trained) / total
        )
    prototypes = [update.prototypes for update in updates if update.prototypes is not None]
    if margin and prototypes:
        merged = Prototypes.stack(prototypes).merged()
        metrics["aggregate_mean_margin"] = float(aggregate_mean_margin(merged))
    return _finite(metrics)


def _finite(metrics: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if math.isfinite(value)}


def _bytes_up(update: ClientUpdate) -> int:
    extra = {}
    if update.prototypes is not None:
        extra = {"sum": update.prototypes.sum, "count": update.prototypes.count}
    if update.local_margin is not None:
        extra["margin"] = update.local_margin
    return num_bytes(update.params, update.buffers, extra)
