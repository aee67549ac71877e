"""How long runs will take on this machine, from a few local steps that are timed here.

Every group of runs that train together is tried with the engine it will use: the jobs of its first
round, cut to a few steps, more and more of them until the time is long enough to be measured; then
one test and one look into a model. The schedule says exactly how many steps and tests all rounds
have.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from fedproto.config import RunConfig
from fedproto.data.base import DataSource
from fedproto.data.federation import Federation
from fedproto.engines.base import Engine
from fedproto.engines.job import LocalJob
from fedproto.measures.base import Gauge
from fedproto.rounds.planning import plan_round, remember_all, roster_of
from fedproto.rounds.runs import Run
from fedproto.simulate import initial_state, model_for
from fedproto.simulate.driver import engine_of
from fedproto.simulate.reference import reference_state
from paper.cases import without_mmd

Clock: TypeAlias = Callable[[], float]

TIMED_RUNS = 3


@dataclass(frozen=True)
class Estimate:
    """What a group of runs will take."""

    runs: int
    steps: int
    seconds: float
    step_seconds: float


@dataclass(frozen=True)
class Work:
    """Jobs and local steps."""

    jobs: int
    steps: int


def estimate(
    configs: Sequence[RunConfig],
    federations: Mapping[DataSource, Federation],
    *,
    budget: float = 1.0,
    clock: Clock = time.perf_counter,
) -> Estimate:
    """Times a few steps and extrapolates.

    A timed pass lasts at least `budget` seconds, unless the round is over before.
    """
    first = configs[0]
    federation = _federation(first, federations)
    together = [config for config in configs if config.data == first.data]
    with engine_of(together, federation, model_for(first, federation)) as engine:
        device = first.engine.torch_device()
        runs = [
            Run(config, initial_state(config, federation).to(device))
            for config in _enough(together)
        ]
        setting = remember_all(runs, engine)
        jobs = [job for run in runs for job in plan_round(run, federation, setting).jobs]
        if not jobs:  # nobody works in the first round: nothing to time, hardly anything to do
            return Estimate(len(configs), 0, 0.0, 0.0)
        start_up = _timed(lambda: engine.train(_cut(jobs, 1)), clock)
        per_job, per_step = _rates(engine, jobs, budget, clock)
        per_test = _timed(lambda: engine.evaluate([jobs[0].state], federation.test_indices), clock)
        measured = next((config for config in configs if config.measure.every), first)
        per_look = _timed(lambda: _look(measured, engine, jobs[0]), clock)
    works = [work_of(config, _federation(config, federations)) for config in configs]
    steps = sum(work.steps for work in works)
    tests = sum(-(-config.schedule.rounds // config.evaluate.every) for config in configs)
    looks = sum(
        -(-config.schedule.rounds // config.measure.every)
        for config in configs
        if config.measure.every
    )
    seconds = start_up + steps * per_step + tests * per_test + looks * per_look
    seconds += sum(work.jobs for work in works) * per_job
    return Estimate(len(configs), steps, seconds, per_step)


def work_of(config: RunConfig, federation: Federation) -> Work:
    """The jobs and local steps of all rounds of a run, as the schedule has them."""
    jobs = [
        batches
        for round_ in range(config.schedule.rounds)
        for batches in roster_of(config, round_, federation).batches
    ]
    return Work(len(jobs), sum(batches.steps for batches in jobs))


def in_words(seconds: float) -> str:
    """A duration as people say it."""
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    minutes = seconds / 60
    return f"{minutes:.0f} min" if minutes < 90 else f"{minutes / 60:.1f} h"


def _enough(together: Sequence[RunConfig]) -> Sequence[RunConfig]:
    """The runs to time: all that train together on a GPU, where the size of the stack counts.

    On a CPU jobs follow one another, so three runs out of many will do.
    """
    if together[0].engine.torch_device().type == "cuda":
        return together
    return together[:: -(-len(together) // TIMED_RUNS)]


def _look(config: RunConfig, engine: Engine, job: LocalJob) -> None:
    """Takes the measures once, but for those that need a run which may not exist yet."""
    if config.measure.every:
        options = without_mmd(config).measure
        Gauge(engine.workload, reference_state).take(options, config.seed, job.state)


def _rates(
    engine: Engine, jobs: Sequence[LocalJob], budget: float, clock: Clock
) -> tuple[float, float]:
    """Seconds per job and per step, from two passes of which one has more steps."""
    at_most, before = 2, (0.0, 0)
    while True:
        cut = _cut(jobs, at_most)
        seconds = _timed(functools.partial(engine.train, cut), clock)
        steps = sum(job.batches.steps for job in cut)
        done = all(job.batches.steps < at_most for job in cut)
        if done or (seconds >= budget and before[1]):
            break
        at_most, before = 2 * at_most, (seconds, steps)
    per_step = (seconds - before[0]) / max(steps - before[1], 1)
    per_job = (seconds - steps * per_step) / len(jobs)
    # A machine that stalls in one of the passes gives nonsense; the longer pass alone does not.
    return (per_job, per_step) if min(per_job, per_step) >= 0 else (0.0, seconds / max(steps, 1))


def _cut(jobs: Sequence[LocalJob], steps: int) -> list[LocalJob]:
    """The jobs with so many steps at most; those without any stay without."""
    return [
        replace(
            job, batches=replace(job.batches, max_steps=min(steps, job.batches.max_steps or steps))
        )
        for job in jobs
    ]


def _timed(work: Callable[[], object], clock: Clock) -> float:
    started = clock()
    work()
    return clock() - started


def _federation(config: RunConfig, federations: Mapping[DataSource, Federation]) -> Federation:
    assert config.data is not None  # noqa: S101 - recipes always have a data set
    return federations[config.data]
