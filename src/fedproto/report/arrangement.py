"""Groups of runs: methods under conditions, found from the options that vary.

A *method* is the name of a run, with the options of its strategy, averaging, head and server and
whether it tolerates partial work, where these tell runs of that name apart. A *condition* is all
else that changes results: data, model, schedule, training. What is only bookkeeping (engine,
checkpoints, measures, when to test) splits nothing, and seeds are repetitions. A *group* is the
runs of one method under one condition, one run per seed.

Training on pooled data knows neither cohorts nor stragglers, so it stands beside every condition on
the same data and model.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, TypeAlias

from fedproto.config import flatten
from fedproto.report.results import StoredRun, comparable
from fedproto.report.style import LineStyle, line_styles

Options: TypeAlias = Mapping[str, str]
Identity: TypeAlias = tuple[tuple[str, str], ...]
"""All options that make up a condition, in order."""

# What comes first says most about a condition; what is not here comes last.
_TELLING = ("data.name", "schedule.delta", "data.alpha", "data", "model", "schedule.cohort")
_SHORT = {"schedule.delta": "δ", "data.alpha": "α", "data.seed": "data seed"}
FAMILY = "data.name"

# Change how a run is executed and observed, not its results.
_BOOKKEEPING = ("engine", "store", "flower", "measure", "evaluate", "label", "serve.also")
# The strategy, and the sections that combine with every one.
_METHOD = ("strategy", "aggregate", "server", "head", "serve")
_PARTIAL_WORK, _AVERAGE = "schedule.partial_work", "serve.average"


@dataclass(frozen=True)
class Condition:
    """The condition of a comparison.

    Attributes:
        family: The data set; scores of different ones are not compared.
        parts: The options that differ from the family's other conditions, with values.
    """

    family: str
    parts: Mapping[str, str]
    title: str


@dataclass(frozen=True)
class Method:
    """A method of a comparison."""

    title: str
    style: LineStyle


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
        """In ascending order."""
        return [run.config.seed for run in self.runs]


@dataclass(frozen=True)
class Arrangement:
    """Runs in order: by data set and condition, methods in the order in which they appeared.

    Attributes:
        notices: Runs that were left out because another run has the same seed.
    """

    methods: tuple[Method, ...]
    conditions: tuple[Condition, ...]
    groups: tuple[Group, ...]
    notices: tuple[str, ...] = ()

    def baselines(self) -> dict[str, str]:
        """The method that the others are compared with, per data set.

        FedAvg if it was run there; otherwise the federated method that shares the most pairs of
        seed and condition with others.
        """
        chosen = {}
        pooled = {group.method for group in self.groups if group.runs[0].config.strategy.pooled}
        for family in dict.fromkeys(condition.family for condition in self.conditions):
            owned: dict[int, set[tuple[int, int]]] = defaultdict(set)
            for group in self.groups:
                if self.conditions[group.conditions[0]].family == family:
                    owned[group.method].update(product(group.conditions, group.seeds))

            def rank(method: int, owned: Mapping[int, set[Any]] = owned) -> tuple[bool, bool, int]:
                pairs = [len(owned[method] & other) for other in owned.values()]
                averaging = self.methods[method].title.casefold() == "fedavg"
                return averaging, method not in pooled, sum(pairs) - len(owned[method])

            chosen[family] = self.methods[max(sorted(owned), key=rank)].title
        return chosen

    def split(self) -> Arrangement:
        """The same with a group per run."""
        single = [
            Group(f"{group.title} · seed {run.config.seed}", group.method, group.conditions, (run,))
            for group in self.groups
            for run in group.runs
        ]
        return Arrangement(self.methods, self.conditions, tuple(single), self.notices)


def arrange(runs: Iterable[StoredRun]) -> Arrangement:
    """Finds methods and conditions.

    Runs on the same data are cut to the rounds they share, see `comparable`.
    """
    found = comparable(runs)
    flats = _told_apart(found, [_telling_options(run) for run in found])
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
    names = list(dict.fromkeys(titles))
    methods = tuple(map(Method, names, line_styles(names)))
    numbers = {method.title: number for number, method in enumerate(methods)}
    several = len({condition.family for condition in shown}) > 1
    groups, notices = [], []
    for (where, title), together in members.items():
        first = shown[where[0]]
        added = first.title if len(where) == 1 else first.family if several else ""
        name = f"{title} · {added}" if added else title
        kept, left_out = _one_per_seed(together)
        groups.append(Group(name, numbers[title], where, tuple(kept)))
        notices += [f"{name}: {text}" for text in left_out]
    groups.sort(key=lambda group: (group.conditions[0], group.method))
    return Arrangement(methods, shown, tuple(groups), tuple(notices))


def _one_per_seed(runs: Sequence[StoredRun]) -> tuple[list[StoredRun], list[str]]:
    """The longest run of each seed, and a sentence for each seed of which another is left out.

    Copies of one run, with the same scores, are left out without notice.
    """
    by_seed: dict[int, list[StoredRun]] = defaultdict(list)
    for run in runs:
        by_seed[run.config.seed].append(run)
    kept, notices = [], []
    for seed, same in sorted(by_seed.items()):
        longest, *others = sorted(same, key=lambda run: -len(run.records))
        kept.append(longest)
        scores = [[record.metrics for record in run.records] for run in same]
        if any(one != scores[0] for one in scores):
            lengths = " and ".join(str(len(run.records)) for run in (longest, *others))
            notices.append(
                f"seed {seed} is stored {len(same)} times ({lengths} rounds);"
                f" only {longest.path} is used"
            )
    return kept, notices


_OF_COHORTS = ("schedule.delta", "schedule.cohort", "schedule.sampling", _PARTIAL_WORK)


def _telling_options(run: StoredRun) -> Options:
    """The options of a run that its method consists of."""
    pooled = run.config.strategy.pooled
    # A strategy's own partial work and average are the same as those that are written down.
    options = flatten(run.config.to_dict()) | {
        _PARTIAL_WORK: run.config.partial_work,
        _AVERAGE: run.config.method.serve.average or "none",
    }
    return {
        name: _text(value)
        for name, value in options.items()
        if not {name, name.partition(".")[0]}.intersection(_BOOKKEEPING)
        and not (pooled and name in _OF_COHORTS)
    }


def _told_apart(runs: Sequence[StoredRun], flats: Sequence[Options]) -> list[Options]:
    """The options, with a fingerprint where equal ones stand for different data or models."""
    prints = [run.fingerprint() for run in runs]
    keys = [
        frozenset(one for one in flat.items() if one[0].startswith(("data.", "model.")))
        for flat in flats
    ]
    known: dict[Any, set[str]] = defaultdict(set)
    for key, text in zip(keys, prints, strict=True):
        known[key] |= {text} - {""}
    return [
        {**flat, "data.fingerprint": text or "unknown"} if len(known[key]) > 1 else flat
        for flat, key, text in zip(flats, keys, prints, strict=True)
    ]


def _identity(flat: Options, own: set[str]) -> Identity:
    """The options of a run's condition."""
    return tuple(
        sorted(
            (name, value)
            for name, value in flat.items()
            if name not in ("seed", _PARTIAL_WORK)
            and name.partition(".")[0] not in _METHOD
            and name not in own
        )
    )


def _beside(key: Identity, federated: set[Identity]) -> tuple[Identity, ...]:
    """The conditions of the same data and model; its own where there are none."""
    asked = {each for each in key if each[0].partition(".")[0] in ("data", "model")}
    return tuple(other for other in federated if asked <= set(other)) or (key,)


def _methods_own(runs: Sequence[StoredRun], flats: Sequence[Options]) -> set[str]:
    """Options of training that each method has one value of: they were chosen for the method.

    And seeds and data that follow the run's seed, which are repetitions too.
    """
    values: dict[str, dict[tuple[str, str], set[str]]] = defaultdict(lambda: defaultdict(set))
    for run, flat in zip(runs, flats, strict=True):
        family = flat.get(FAMILY, "")
        for option, value in flat.items():
            if option.endswith((".seed", ".fingerprint")):
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
    """A title per run; runs with one name and condition are distinguished by how they differ."""
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


def varying(options: Sequence[Options]) -> list[str]:
    """The names of options that do not have the same value everywhere."""
    names = set().union(*options)
    return [name for name in names if len({each.get(name) for each in options}) > 1]


def named_conditions(keys: set[Identity], federated: set[Identity]) -> dict[Identity, Condition]:
    """The conditions in order, each with a title of what tells it apart in its family."""
    families: dict[str, list[Identity]] = defaultdict(list)
    for key in keys:
        families[dict(key).get(FAMILY, "own data")].append(key)
    found: list[tuple[Any, Identity, Condition]] = []
    for family, members in families.items():
        telling = _telling([dict(key) for key in members])
        for key in members:
            options = dict(key)
            parts = {_short(name, telling): options[name] for name in telling if name in options}
            if key not in federated:
                parts["training"] = "pooled"
            words = [family] if len(families) > 1 else []
            words += [
                {"true": name, "false": f"no {name}"}.get(value, f"{name} {value}")
                for name, value in parts.items()
            ]
            order = (family, [_sortable(value) for value in parts.values()])
            found.append((order, key, Condition(family, parts, " · ".join(words))))
    found.sort(key=lambda each: each[0])
    return {key: condition for _, key, condition in found}


def _telling(conditions: Sequence[Options]) -> list[str]:
    """As few options as tell the conditions apart, those that say most about them first."""

    def rank(name: str) -> tuple[int, str]:
        named = name if name in _TELLING else name.partition(".")[0]
        return _TELLING.index(named) if named in _TELLING else len(_TELLING), name

    kept = sorted(varying(conditions), key=rank)
    for name in reversed(kept):
        rest = [other for other in kept if other != name]
        apart = {tuple(options.get(other) for other in rest) for options in conditions}
        if len(apart) == len(conditions):
            kept = rest
    return kept


def _short(name: str, others: Sequence[str]) -> str:
    if name in _SHORT:
        return _SHORT[name]
    last = name.rpartition(".")[2]
    alone = sum(other.rpartition(".")[2] == last for other in others) < 2
    return (last if alone else name).replace("_", " ")


def _sortable(value: str) -> tuple[int, float, str]:
    try:
        return 0, float(value), ""
    except ValueError:
        return 1, 0.0, value
