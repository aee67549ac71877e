"""Which runs exist: run directories by what their results depend on.

Two configurations have the same *settings digest* when they describe the same experiment. What only
says where and how often to look (engine, tests, measures, checkpoints, label) is left out of it, so
that a run made on another machine, by `fedproto sweep` or by another table, is found and reused.
A run of more rounds than are asked for begins with them, so it is taken up to there, even one that
was stopped on its way.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fedproto.config import RunConfig, digest_of, recipe
from fedproto.config.upgrade import MARKS
from fedproto.data.base import DATASETS
from fedproto.data.tasks import headline
from fedproto.errors import FedprotoError
from fedproto.report.results import StoredRun
from fedproto.store import RunStore, is_run, read_description
from fedproto.store.run import FORMAT

_NO_RESULT = ("label", "engine", "evaluate", "measure", "stop")
_OF_COHORTS = ("delta", "sampling", "partial_work")


@functools.cache
def settings_digest(config: RunConfig) -> str:
    """A digest of what a run's results depend on."""
    # A strategy's own partial work and average are the same as those that are written down.
    schedule = replace(config.schedule, partial_work=config.partial_work)
    serve = replace(config.serve, average=config.method.serve.average or "none")
    config = replace(config, schedule=schedule, serve=serve)
    tables = {name: part for name, part in config.to_dict().items() if name not in _NO_RESULT}
    if "data" in tables:
        tables["data"] = {k: v for k, v in tables["data"].items() if k != "allow_missing"}
    if "pretrained" in tables.get("model", {}):  # where the file lies changes nothing
        name = Path(tables["model"]["pretrained"]).name
        tables["model"] = {**tables["model"], "pretrained": name}
    if config.strategy.pooled:
        tables["schedule"] = {k: v for k, v in tables["schedule"].items() if k not in _OF_COHORTS}
    return digest_of(tables)


def options_without_successor(tables: Mapping[str, Any]) -> list[str]:
    """Options of a stored strategy that changed its results, and that are gone.

    Such a run can be shown and compared, but is not a run of the configuration it is read as.
    """
    old = tables.get("strategy")
    if not isinstance(old, Mapping) or not any(mark in old for mark in MARKS):
        return []
    by_class = old.get("head") == "by-class"
    took_effect = {
        "weights": old.get("weights") == "balanced",
        "rehearsal": old.get("rehearsal", 0) != 0,
        "flip": by_class and old.get("flip", 0) != 0,
        "head_others": by_class and old.get("head_others", 0) != 0,
        "head_weights": by_class and old.get("head_weights") == "margins",
        "sharpness": old.get("sharpness") is not None,
        "max_attention": old.get("max_attention") is not None,
    }
    return [name for name, took in took_effect.items() if took]


@dataclass(frozen=True)
class Request:
    """A run that an experiment wants.

    Attributes:
        needs: Measures that must have been taken during it.
        wishes: Measures without which a run will do where nothing is trained.
        validated: Whether it must have been tested on the validation part.
        checkpoint: Whether its final weights are needed as well.
        instead: A file in the run directory that makes the weights unnecessary.
        begun: Whether a run that is still on its way will do where nothing is trained.
        first: The number of rounds that are needed of it; None for all.
        order: Requests of a lower order are trained first.
    """

    case: str
    config: RunConfig
    needs: frozenset[str] = frozenset()
    wishes: frozenset[str] = frozenset()
    validated: bool = False
    checkpoint: bool = False
    instead: str = ""
    begun: bool = False
    first: int | None = None
    order: int = 0

    def is_answered_by(
        self, run: StoredRun, *, modest: bool = False, first: int | None = None
    ) -> bool:
        """Whether a run of the same settings gives what is asked for; modestly, what it must.

        Where only the `first` rounds are looked at, a run that stopped after them will do.
        """
        measured = self.needs if modest else self.needs | self.wishes
        first = self.first or first
        rounds = self.config.schedule.rounds
        enough = first or (1 if self.begun and modest else rounds)
        begun = run.config.schedule.rounds == rounds and len(run.records) >= enough
        if not (begun or begins_as_run_of(run, rounds)):
            return False
        if not all(map(run.config.measure.takes, measured)):
            return False
        if self.validated and not validation_score(_up_to(first or rounds, run)):
            return False
        if not self.checkpoint:
            return True
        if self.instead and (run.path / self.instead).exists():
            return len(run.records) == rounds
        return RunStore(run.path, run.config, "").newest_round() == rounds


SEED_OF_DRAW = {
    ("mnist", 1): 0,
    ("femnist", 11): 21,
    ("femnist", 929): 9937,
    ("fpascal", 65): 4,
    ("fpascal-macro", 65): 4,
}
"""Seeds whose draw of sizes is like Table 1's: under the random streams of runs up to format 2, and
today's."""


def _as_today(store: RunStore) -> RunConfig:
    """A stored run's configuration; of an earlier one, with the seed that its draw has today."""
    config, data = store.config, store.config.data
    if store.format == FORMAT or data is None:
        return config
    seed = SEED_OF_DRAW.get((DATASETS.name_of(type(data)), data.seed), data.seed)
    return replace(config, data=replace(data, seed=seed))


class Library:
    """The run directories below a folder, of whose runs only the `first` rounds may be shown."""

    def __init__(
        self, root: Path, notify: Callable[[str], None] = lambda _: None, first: int | None = None
    ) -> None:
        self.root = root
        self.first = first
        self._notify = notify
        self._paths: dict[str, list[Path]] = {}
        self._read: dict[Path, StoredRun] = {}
        for file in sorted(root.rglob("run.json")):
            self.add(file.parent)

    def add(self, path: Path) -> None:
        """Makes a run directory known; one that cannot be read is left out with a notice."""
        try:
            store = RunStore.open(path)
        except FedprotoError as error:
            self._notify(f"{path} is left out: {error}")
            return
        if options_without_successor(read_description(store.path)["config"]):
            return  # it would pass for a run of the options that are left
        paths = self._paths.setdefault(_whatever_rounds(_as_today(store)), [])
        if path not in paths:
            paths.append(path)
        self._read.pop(path, None)

    def find(self, request: Request, *, modest: bool = False) -> StoredRun | None:
        """A run that gives what is asked for, up to there; modestly, with most of the wishes."""
        answers = (
            run
            for run in self._runs(request.config)
            if request.is_answered_by(run, modest=modest, first=self.first)
        )
        found = max(
            answers,
            key=lambda run: (
                sum(map(run.config.measure.takes, request.wishes)),
                -len(run.records),
            ),
            default=None,
        )
        rounds = request.first or self.first or request.config.schedule.rounds
        return found and _up_to(rounds, found)

    def place_for(self, config: RunConfig, folder: str) -> Path:
        """Where to train a run: the directory of one that was stopped, or a new one.

        A finished run is never written to again, even when it lacks something.
        """
        for run in self._runs(config):
            if run.config.digest() == config.digest() and not is_complete(run):
                return run.path
        name = f"{run_name(config)}-{config.digest()[:8]}"
        path, number = self.root / folder / name, 2
        while is_run(path):
            path, number = path.with_name(f"{name}-{number}"), number + 1
        return path

    def _runs(self, config: RunConfig) -> list[StoredRun]:
        """The runs of the same settings, of any number of rounds."""
        return [self._stored(path) for path in self._paths.get(_whatever_rounds(config), [])]

    def _stored(self, path: Path) -> StoredRun:
        if path not in self._read:
            store = RunStore.open(path)
            self._read[path] = StoredRun(path, store.config, store.records())
        return self._read[path]


def is_complete(run: StoredRun) -> bool:
    """Whether all rounds of a run are on record, with or without checkpoints beside them."""
    return len(run.records) >= run.config.schedule.rounds


def validation_score(run: StoredRun) -> str:
    """The name of a run's main score on the validation part; empty where there is none."""
    names = {name for record in run.records for name in record.metrics}
    known = [name for name in names if name.startswith("validation_")]
    return headline(known) if known else ""


def _whatever_rounds(config: RunConfig) -> str:
    return settings_digest(config.of_rounds(1))


def _up_to(rounds: int, run: StoredRun) -> StoredRun:
    if rounds == run.config.schedule.rounds:
        return run
    return replace(run, config=run.config.of_rounds(rounds), records=run.records[:rounds])


def concentration(config: RunConfig) -> float | None:
    """The concentration α of the class mix, where the data are shared out by one."""
    by_mix = getattr(config.data, "partition", "") == "dirichlet"
    return getattr(config.data, "alpha", None) if by_mix else None


def run_name(config: RunConfig) -> str:
    """A readable name: label, then what recipes sweep over."""
    parts = [config.title]
    alpha = concentration(config)
    if alpha is not None:
        parts.append(f"alpha{alpha:g}")
    if not config.strategy.pooled:
        parts.append(f"delta{config.schedule.delta:g}")
    parts.append(f"seed{config.seed}")
    return recipe.directory_name("-".join(parts))


def merged(requests: Iterable[Request]) -> list[Request]:
    """Requests for the same run as one that covers all of them, in order of first appearance."""
    by_run: dict[str, Request] = {}
    for request in requests:
        key = settings_digest(request.config)
        known = by_run.get(key, request)
        config = _measured_for_both(known.config, request.config)
        validated = known.validated or request.validated
        if validated:
            config = replace(config, evaluate=replace(config.evaluate, validation=True))
        by_run[key] = Request(
            known.case,
            config,
            known.needs | request.needs,
            known.wishes | request.wishes,
            validated,
            known.checkpoint or request.checkpoint,
            known.instead if known.instead == request.instead or not request.checkpoint else "",
            first=known.first and request.first and max(known.first, request.first),
            order=min(known.order, request.order),
        )
    return list(by_run.values())


def _measured_for_both(one: RunConfig, other: RunConfig) -> RunConfig:
    """The first of two requested configurations, with what either measures, as often as either."""
    if not one.measure.every or not other.measure.every:
        return one if one.measure.every else other
    what = tuple(dict.fromkeys((*one.measure.what, *other.measure.what)))
    every = min(one.measure.every, other.measure.every)
    return replace(one, measure=replace(one.measure, what=what, every=every))


def begins_as_run_of(run: StoredRun, rounds: int) -> bool:
    """Whether a run's first rounds are a run of that length; not if its rate falls more slowly."""
    same = run.config.schedule.rounds == rounds or run.config.train.lr_schedule == "constant"
    return same and len(run.records) >= rounds
