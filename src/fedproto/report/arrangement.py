"""Which runs belong together: methods under conditions, found from what varies.

A *method* is what a run is called, with the options of its strategy, averaging and server that tell
runs of that name apart. A *condition* is all else that changes results: data, model, schedule,
training. What is only bookkeeping (engine, checkpoints, measures, when to test) splits nothing, and
seeds are repetitions. A *group* is the runs of one method under one condition.

Training on pooled data knows neither cohorts nor stragglers, so it stands beside every condition on
the same data and model.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from fedproto.config import flatten
from fedproto.report.comparable import comparable
from fedproto.report.conditions import (
    FAMILY,
    Condition,
    Identity,
    Options,
    named_conditions,
    varying,
)
from fedproto.report.looks import Look, looks_of
from fedproto.report.results import StoredRun

BOOKKEEPING = ("engine", "store", "flower", "measure", "evaluate")
"""Sections that change how a run is carried out and watched, not what it is a run of."""

# The strategy, and what combines with every one.
_METHOD = ("strategy", "aggregate", "server")


@dataclass(frozen=True)
class Method:
    """What is compared."""

    title: str
    look: Look


@dataclass(frozen=True)
class Group:
    """Runs that differ in nothing but the seed and bookkeeping.

    Attributes:
        conditions: Numbers among its conditions: one, or all that pooled training stands beside.
    """

    title: str
    method: int
    conditions: tuple[int, ...]
    runs: tuple[StoredRun, ...]

    @property
    def seeds(self) -> list[int]:
        """Each once, though a seed may have been run twice."""
        return sorted({run.config.seed for run in self.runs})


@dataclass(frozen=True)
class Arrangement:
    """Runs in order: by data set and condition, methods in the order in which they appeared."""

    methods: tuple[Method, ...]
    conditions: tuple[Condition, ...]
    groups: tuple[Group, ...]

    @property
    def first(self) -> str:
        """The method that the others are compared with unless another is named."""
        federated = [
            self.methods[group.method].title
            for group in self.groups
            if not group.runs[0].config.strategy.pooled
        ]
        order = [method.title for method in self.methods]
        return min(federated or order, key=order.index)

    def split(self) -> Arrangement:
        """The same with a group per run."""
        single = [
            Group(f"{group.title} · seed {run.config.seed}", group.method, group.conditions, (run,))
            for group in self.groups
            for run in group.runs
        ]
        return Arrangement(self.methods, self.conditions, tuple(single))


def arrange(runs: Iterable[StoredRun], known: Sequence[str] = ()) -> Arrangement:
    """Finds methods and conditions.

    Runs on the same data are brought to the rounds they share, see `comparable`.

    Titles that were `known` before keep their looks.
    """
    found = comparable(runs)
    flats = [_telling_options(run) for run in found]
    pooled = [run.config.strategy.pooled for run in found]
    own = _methods_own(found, flats)
    identities = [_identity(flat, own) for flat in flats]
    federated = {key for key, alone in zip(identities, pooled, strict=True) if not alone}
    beside = [
        _beside(key, federated) if alone else (key,)
        for key, alone in zip(identities, pooled, strict=True)
    ]
    conditions = named_conditions({key for keys in beside for key in keys}, federated)
    number_of = {key: number for number, key in enumerate(conditions)}
    under = [tuple(sorted(number_of[key] for key in keys)) for keys in beside]
    titles = _method_titles(found, flats, under)
    members: dict[tuple[tuple[int, ...], str], list[StoredRun]] = defaultdict(list)
    for run, title, where in zip(found, titles, under, strict=True):
        members[where, title].append(run)
    shown = tuple(conditions.values())
    methods = _methods(titles, known)
    numbers = {method.title: number for number, method in enumerate(methods)}
    groups = [
        Group(
            _group_title(title, [shown[number] for number in where], shown),
            numbers[title],
            where,
            tuple(sorted(together, key=lambda run: run.config.seed)),
        )
        for (where, title), together in members.items()
    ]
    groups.sort(key=lambda group: (group.conditions[0], group.method))
    return Arrangement(methods, shown, tuple(groups))


_OF_COHORTS = ("schedule.delta", "schedule.cohort")


def _telling_options(run: StoredRun) -> Options:
    """What makes a run what it is, option by option."""
    nothing = (*BOOKKEEPING, "label")
    pooled = run.config.strategy.pooled
    return {
        name: _text(value)
        for name, value in flatten(run.config.to_dict()).items()
        if name.partition(".")[0] not in nothing and not (pooled and name in _OF_COHORTS)
    }


def _identity(flat: Options, own: set[str]) -> Identity:
    """All that makes up a run's condition."""
    return tuple(
        sorted(
            (name, value)
            for name, value in flat.items()
            if name != "seed" and name.partition(".")[0] not in _METHOD and name not in own
        )
    )


def _beside(key: Identity, federated: set[Identity]) -> tuple[Identity, ...]:
    """The conditions that pooled training belongs to: of the same training if any, or of the same
    data and model; its own where there are none.
    """  # noqa: D205 - one thought
    for sections in (("data", "model", "train"), ("data", "model")):
        asked = {each for each in key if each[0].partition(".")[0] in sections}
        near = tuple(other for other in federated if asked <= set(other))
        if near:
            return near
    return (key,)


def _methods(titles: Sequence[str], known: Sequence[str]) -> tuple[Method, ...]:
    every = list(dict.fromkeys([*known, *titles]))
    looks = dict(zip(every, looks_of(every), strict=True))
    return tuple(Method(title, looks[title]) for title in dict.fromkeys(titles))


def _methods_own(runs: Sequence[StoredRun], flats: Sequence[Options]) -> set[str]:
    """Options of training that each method has one value of: they were chosen for the method.

    And seeds inside other sections that follow the run's seed, which are repetitions too.
    """
    values: dict[str, dict[tuple[str, str], set[str]]] = defaultdict(lambda: defaultdict(set))
    for run, flat in zip(runs, flats, strict=True):
        family = flat.get(FAMILY, "")
        for option, value in flat.items():
            if option.endswith(".seed"):
                values[option][family, flat["seed"]].add(value)
            elif option.startswith(("train.", "augment.")) and not run.config.strategy.pooled:
                values[option][family, run.config.title.casefold()].add(value)
    return {
        option
        for option, by_owner in values.items()
        if all(len(found) == 1 for found in by_owner.values())
        and len(set().union(*by_owner.values())) > 1
    }


def _method_titles(
    runs: Sequence[StoredRun], flats: Sequence[Options], under: Sequence[tuple[int, ...]]
) -> list[str]:
    """A title per run; runs of one name under one condition are told apart by how they differ."""
    names = [run.config.title.casefold() for run in runs]
    together: dict[tuple[str, tuple[int, ...]], list[Options]] = defaultdict(list)
    for name, flat, where in zip(names, flats, under, strict=True):
        together[name, where].append(flat)
    telling: dict[tuple[str, str], set[str]] = defaultdict(set)
    for (name, _), inside in together.items():
        telling[name, inside[0].get(FAMILY, "")] |= {
            option for option in varying(inside) if option.rpartition(".")[2] != "seed"
        }
    first: dict[str, str] = {}
    titles = []
    for run, name, flat in zip(runs, names, flats, strict=True):
        details = [
            f"{option.rpartition('.')[2]}={flat[option]}"
            for option in sorted(telling[name, flat.get(FAMILY, "")])
            if option in flat
        ]
        title = first.setdefault(name, run.config.title)
        titles.append(title + (f" ({', '.join(details)})" if details else ""))
    return titles


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return ", ".join(map(_text, value))
    return str(value)


def _group_title(method: str, under: Sequence[Condition], all_: Sequence[Condition]) -> str:
    if len(under) == 1:
        return method + (f" · {under[0].title}" if under[0].title else "")
    several = len({condition.family for condition in all_}) > 1
    return method + (f" · {under[0].family}" if several else "")
