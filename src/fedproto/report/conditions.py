"""Conditions that methods are compared under, named by as few options as tell them apart."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

Options: TypeAlias = Mapping[str, str]
Identity: TypeAlias = tuple[tuple[str, str], ...]
"""All options that make up a condition, in order."""

# What comes first says most about a condition; what is not here comes last.
_TELLING = ("data.name", "schedule.delta", "data.alpha", "data", "model", "task", "schedule.cohort")
_SHORT = {"schedule.delta": "δ", "data.alpha": "α"}
FAMILY = "data.name"
OWN_DATA = "own data"


@dataclass(frozen=True)
class Condition:
    """What it is compared under.

    Attributes:
        family: The data set; scores of different ones are not compared.
        parts: What tells it apart from the family's other conditions, as name and value.
    """

    family: str
    parts: Mapping[str, str]
    title: str
    options: Options


def varying(options: Sequence[Options]) -> list[str]:
    """The names of options that do not have the same value everywhere."""
    names = set().union(*options)
    return [name for name in names if len({each.get(name) for each in options}) > 1]


def named_conditions(keys: set[Identity], federated: set[Identity]) -> dict[Identity, Condition]:
    """The conditions in order, each with a title of what tells it apart in its family."""
    families: dict[str, list[Identity]] = defaultdict(list)
    for key in keys:
        families[dict(key).get(FAMILY, OWN_DATA)].append(key)
    found: list[tuple[Any, Identity, Condition]] = []
    for family, members in families.items():
        telling = _telling([dict(key) for key in members])
        for key in members:
            options = dict(key)
            parts = {_short(name, telling): options[name] for name in telling if name in options}
            if key not in federated:
                parts["training"] = "pooled"
            words = [family] if len(families) > 1 else []
            words += [_words(name, value) for name, value in parts.items()]
            order = (family, [_sortable(value) for value in parts.values()])
            found.append((order, key, Condition(family, parts, " · ".join(words), options)))
    found.sort(key=lambda each: each[0])
    return {key: condition for _, key, condition in found}


def _telling(conditions: Sequence[Options]) -> list[str]:
    """As few options as tell the conditions apart, those that say most about them first."""
    kept = sorted(varying(conditions), key=lambda name: (_rank(name), name))
    for name in reversed(kept):
        rest = [other for other in kept if other != name]
        apart = {tuple(options.get(other) for other in rest) for options in conditions}
        if len(apart) == len(conditions):
            kept = rest
    return kept


def _rank(name: str) -> int:
    section = name.partition(".")[0]
    named = name if name in _TELLING else section
    return _TELLING.index(named) if named in _TELLING else len(_TELLING)


def _short(name: str, others: Sequence[str]) -> str:
    if name in _SHORT:
        return _SHORT[name]
    last = name.rpartition(".")[2]
    alone = sum(other.rpartition(".")[2] == last for other in others) < 2
    return (last if alone else name).replace("_", " ")


def _words(name: str, value: str) -> str:
    return {"true": name, "false": f"no {name}"}.get(value, f"{name} {value}")


def _sortable(value: str) -> tuple[int, float, str]:
    try:
        return 0, float(value), ""
    except ValueError:
        return 1, 0.0, value
