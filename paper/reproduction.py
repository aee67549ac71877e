"""From a list of experiments to their tables and figures: plan, train what is missing, draw."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

from fedproto.callback import Callback
from fedproto.config import RunConfig
from fedproto.data.base import DataSource
from fedproto.data.federation import Federation
from fedproto.errors import ConfigError, DataError, unknown_name
from fedproto.rounds import Run, load_federations, runs_from
from fedproto.rounds import train as train_runs
from fedproto.store import RunStore, open_or_create, read_description
from paper.base import EXPERIMENTS, Experiment, FoundRun, FoundRuns
from paper.cases import Scope, without_mmd
from paper.library import Library, Request, merged, settings_digest
from paper.output import Output

ALL = "all"


@dataclass
class Plan:
    """What is to be done.

    Attributes:
        results: What each of them gets from runs that exist.
    """

    scope: Scope
    experiments: dict[str, Experiment]
    training: bool = True
    requests: dict[str, list[Request]] = field(default_factory=dict)
    results: dict[str, FoundRuns] = field(default_factory=dict)
    missing: list[Request] = field(default_factory=list)

    def look(self, library: Library) -> None:
        """Finds out which runs are wanted, and which exist."""
        self.requests = {
            name: [*each.requests(self.scope), *each.more(self.scope, library)]
            for name, each in self.experiments.items()
        }
        self.results = {
            name: FoundRuns(wanted, library, modest=not self.training)
            for name, wanted in self.requests.items()
        }
        self.missing = merged(each for found in self.results.values() for each in found.missing)
        if self.training:
            self._add_references(library)

    @property
    def found(self) -> int:
        """How many runs exist."""
        return len({each.run.path for found in self.results.values() for each in found})

    def stages(self) -> Iterator[tuple[str, list[Request]]]:
        """The missing runs in the order in which they can be trained, by data set."""
        cases = list(dict.fromkeys(request.case for request in self.missing))

        def rank(request: Request) -> tuple[int, int, bool]:
            place = cases.index(request.case)
            return request.order, place, not request.config.strategy.pooled

        for (_, place, _), stage in itertools.groupby(sorted(self.missing, key=rank), rank):
            yield cases[place], list(stage)

    def _add_references(self, library: Library) -> None:
        """Also plans the centralised runs that missing runs are to be compared with."""
        planned = {settings_digest(request.config) for request in self.missing}
        compared = {each.case for each in self.missing if each.config.measure.takes("mmd")}
        for case in sorted(compared):
            for config in self.scope.case(case).centralized():
                reference = Request(case, config, checkpoint=True)
                if settings_digest(config) not in planned and library.find(reference) is None:
                    self.missing.append(reference)


def make_plan(
    names: Sequence[str], scope: Scope, library: Library, *, training: bool = True
) -> Plan:
    """What has to be done for some experiments."""
    known = EXPERIMENTS.names()
    for name in names:
        if name not in (*known, ALL):
            raise ConfigError(unknown_name("experiment", name, (*known, ALL)))
    chosen = known if ALL in names else list(dict.fromkeys(names))
    experiments = {name: EXPERIMENTS.get(name)() for name in chosen}
    about = {name: each for name, each in experiments.items() if scope.cases(each.cases)}
    if not about:
        raise ConfigError(
            f"--only: {', '.join(chosen)} is about {', '.join(experiments[chosen[0]].cases)}"
        )
    plan = Plan(scope, about, training)
    plan.look(library)
    return plan


def load_data(
    plan: Plan, prepare: Callable[[Sequence[DataSource]], None], notify: Callable[[str], None]
) -> dict[DataSource, Federation]:
    """Loads what the missing runs train on; data sets that are not there are left out."""
    federations: dict[DataSource, Federation] = {}
    for case in dict.fromkeys(request.case for request in plan.missing):
        configs = [without_mmd(each.config) for each in plan.missing if each.case == case]
        try:
            prepare([config.data for config in configs if config.data is not None])
            federations |= load_federations(configs)
        except DataError as error:
            notify(f"{case} is left out: {error}")
            plan.missing = [request for request in plan.missing if request.case != case]
    return federations


class TimeLimit(Callback):
    """Pauses runs that train together after the round with which the time is over."""

    def __init__(self, minutes: float | None) -> None:
        self._end = math.inf if minutes is None else time.monotonic() + 60 * minutes
        self._began: float | None = None
        self._pass = 0.0
        self.runs: Sequence[Run] = ()

    @property
    def is_over(self) -> bool:
        """Whether a round would end too late, if it takes as long as the one before."""
        return time.monotonic() + self._pass > self._end

    def on_pass(self, num_jobs: int) -> None:
        """A round of all runs begins; it is the last if the next would end too late."""
        del num_jobs
        now = time.monotonic()
        self._pass = 0.0 if self._began is None else now - self._began
        self._began = now
        if now + 2 * self._pass > self._end:
            for run in self.runs:
                done = len(run.records) + 1
                run.pause = done if run.pause is None else min(run.pause, done)

    def on_end(self) -> None:
        """What comes next is no round."""
        self._began = None


def train(
    plan: Plan,
    library: Library,
    federations: Mapping[DataSource, Federation],
    watch: Callable[[Sequence[RunStore]], AbstractContextManager[Callback]],
    minutes: float | None = None,
) -> bool:
    """Trains the missing runs, each from where it stands, then those that are wanted after them.

    With `minutes` it stops in time, after a round; the same call continues from there.

    Returns:
        Whether it went to the end.
    """
    limit, tried = TimeLimit(minutes), set[tuple[str, int | None]]()

    def untried(stage: Sequence[Request]) -> list[Request]:
        return [one for one in stage if (one.config.digest(), one.first) not in tried]

    while wanted := untried(plan.missing):
        # What is trained first may change what is wanted later.
        order = min(one.order for one in wanted)
        for case, stage in plan.stages():
            if limit.is_over:
                break
            if stage[0].order == order and (new := untried(stage)):
                folder = f"{plan.scope.scale}/{case}"
                _train_stage(folder, new, plan, library, federations, watch, limit)
        tried |= {(one.config.digest(), one.first) for one in wanted if one.order == order}
        plan.look(library)
        # Data sets that could not be loaded stay left out.
        plan.missing = [each for each in plan.missing if each.config.data in federations]
        if limit.is_over:
            return not plan.missing
    return True


def _train_stage(
    folder: str,
    stage: Sequence[Request],
    plan: Plan,
    library: Library,
    federations: Mapping[DataSource, Federation],
    watch: Callable[[Sequence[RunStore]], AbstractContextManager[Callback]],
    limit: TimeLimit,
) -> None:
    """Trains runs that need not wait for each other."""
    configs = [with_reference(request, plan.scope, library) for request in stage]
    stores = [open_or_create(library.place_for(config, folder), config) for config in configs]
    needed = {store.path: request.first for store, request in zip(stores, stage, strict=True)}
    limit.runs = runs_from(stores, federations)
    for run in limit.runs:
        run.pause = needed[run.store.path] if run.store is not None else None
    with watch(stores) as callback:
        train_runs(limit.runs, [callback, limit])
    for store in stores:
        library.add(store.path)


def with_reference(request: Request, scope: Scope, library: Library) -> RunConfig:
    """A run that is to be compared with the centralised run of its seed, told where that is.

    Where there is none the comparison is left out.
    """
    config = request.config
    if not config.measure.takes("mmd"):
        return config
    for central in scope.case(request.case).centralized():
        run = library.find(Request(request.case, central, checkpoint=True))
        if central.seed == config.seed and run is not None:
            return replace(config, measure=replace(config.measure, reference=str(run.path)))
    return without_mmd(config)


def render(plan: Plan, name: str, output: Output, facts: Mapping[str, Any]) -> None:
    """Draws one experiment from the runs that there are, and writes where they came from."""
    requests = plan.requests[name]
    results = plan.results[name]
    if requests and len(results.missing) == len(requests):
        output.say(
            f"{name}: none of its {len(requests)} runs exists with all it needs; nothing to show"
        )
        return
    if results.missing:
        output.say(
            f"{name}: {len(results.missing)} of {len(requests)} runs are missing and left out:"
            f" {', '.join(_in_words(results.missing))}"
        )
    plan.experiments[name].render(plan.scope, results, output)
    origin = {"experiment": name, "title": plan.experiments[name].title, **facts}
    output.origin(name, {**origin, "runs": [_origin(result) for result in results]})


NAMED = 20
"""Missing runs that are named."""


def _in_words(missing: Iterable[Request]) -> list[str]:
    """Runs by data set, label and seeds; δ and α are left out, for brevity."""
    seeds: dict[str, set[int]] = {}
    for each in missing:
        seeds.setdefault(f"{each.case} {each.config.title}", set()).add(each.config.seed)
    words = [
        f"{label} (seed {', '.join(str(seed) for seed in sorted(found))})"
        for label, found in sorted(seeds.items())
    ]
    return words if len(words) <= NAMED else [*words[:NAMED], f"{len(words) - NAMED} more"]


def _origin(result: FoundRun) -> dict[str, Any]:
    environment = read_description(result.run.path).get("environment", {})
    return {
        "directory": str(result.run.path),
        "data_set": result.request.case,
        "label": result.label,
        "digest": result.run.config.digest(),
        "seed": result.seed,
        "rounds": len(result.run.records),
        "seconds": round(sum(record.seconds for record in result.run.records), 1),
        "commit": environment.get("commit"),
        "devices": environment.get("devices"),
    }
