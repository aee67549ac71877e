"""From a list of experiments to their tables and figures: plan, train what is missing, draw."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

from fedproto.callback import Callback
from fedproto.config import RunConfig
from fedproto.data.base import DataSource
from fedproto.data.federation import Federation
from fedproto.errors import ConfigError, DataError, unknown_name
from fedproto.rounds import load_federations, runs_from
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
    requests: dict[str, list[Request]]
    training: bool = True
    results: dict[str, FoundRuns] = field(default_factory=dict)
    missing: list[Request] = field(default_factory=list)

    def look(self, library: Library) -> None:
        """Finds out which runs exist."""
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
        for case in dict.fromkeys(request.case for request in self.missing):
            wanted = [request for request in self.missing if request.case == case]
            for pooled in (True, False):
                stage = [each for each in wanted if each.config.strategy.pooled is pooled]
                if stage:
                    yield case, stage

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
    requests = {name: each.requests(scope) for name, each in about.items()}
    plan = Plan(scope, about, requests, training)
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


def train(
    plan: Plan,
    library: Library,
    federations: Mapping[DataSource, Federation],
    watch: Callable[[Sequence[RunStore]], AbstractContextManager[Callback]],
) -> None:
    """Trains the missing runs, each from where it stands, and looks again."""
    for case, stage in plan.stages():
        configs = [with_reference(request, plan.scope, library) for request in stage]
        folder = f"{plan.scope.scale}/{case}"
        stores = [open_or_create(library.place_for(config, folder), config) for config in configs]
        with watch(stores) as callback:
            train_runs(runs_from(stores, federations), [callback])
        for store in stores:
            library.add(store.path)
    plan.look(library)


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


def _in_words(missing: Iterable[Request]) -> list[str]:
    """Runs by data set, label and seeds; δ and α are left out, for brevity."""
    seeds: dict[str, set[int]] = {}
    for each in missing:
        seeds.setdefault(f"{each.case} {each.config.title}", set()).add(each.config.seed)
    return [
        f"{label} (seed {', '.join(str(seed) for seed in sorted(found))})"
        for label, found in sorted(seeds.items())
    ]


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
