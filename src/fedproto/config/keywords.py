"""Keywords of a program as the tables of a recipe: single options find their sections."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, TypeAlias, TypedDict

from fedproto.config.options import (
    EvaluateOptions,
    FlowerOptions,
    ScheduleOptions,
    StopOptions,
    StoreOptions,
)
from fedproto.config.run import CHOICES, RunConfig, dotted_names, options_of
from fedproto.data.tasks import TaskOptions
from fedproto.engines.base import EngineOptions
from fedproto.engines.training import TrainOptions
from fedproto.engines.training.augment import AugmentOptions
from fedproto.errors import ConfigError, unknown_name
from fedproto.measures import MeasureOptions
from fedproto.options import Options, options_to_dict
from fedproto.strategies.aggregation import AggregateOptions
from fedproto.strategies.base import STRATEGIES
from fedproto.strategies.sections import HeadOptions, ServerOptions
from fedproto.strategies.serve import ServeOptions

ROUNDS = 50
"""How many rounds, when nobody says."""

COMMON = {
    "rounds": "schedule",
    "cohort": "schedule",
    "delta": "schedule",
    "epochs": "train",
    "batch_size": "train",
    "lr": "train",
    "device": "engine",
}
"""Options that programs name by themselves, and the sections they are in."""

Table: TypeAlias = Mapping[str, Any]


class Sections(TypedDict, total=False):
    """The sections of a recipe as keywords: options, or a table of them."""

    task: TaskOptions | Table
    train: TrainOptions | Table
    augment: AugmentOptions | Table
    aggregate: AggregateOptions | Table
    server: ServerOptions | Table
    head: HeadOptions | Table
    serve: ServeOptions | Table
    schedule: ScheduleOptions | Table
    evaluate: EvaluateOptions | Table
    measure: MeasureOptions | Table
    stop: StopOptions | Table
    store: StoreOptions | Table
    engine: EngineOptions | Table | str
    flower: FlowerOptions | Table


def as_tables(keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Keywords, sections or single options by their own names, as the tables of a recipe."""
    known = [item.name for item in fields(RunConfig)]
    tables = {name: value for name, value in keywords.items() if name in known}
    single: dict[str, dict[str, Any]] = {"schedule": {"rounds": ROUNDS}}
    for name, value in keywords.items():
        if name not in known:
            section = COMMON.get(name) or _section_of(name, known, keywords)
            single.setdefault(section, {})[name] = value
    for section, given in single.items():
        table = tables.get(section, {})
        if isinstance(table, Options):
            table = options_to_dict(table)
        elif isinstance(table, str):
            table = {"name": table}
        if not isinstance(table, Mapping):
            raise ConfigError(f"{section} must be a section of options, not {table!r}")
        asked = {name: value for name, value in given.items() if name in keywords}
        tables[section] = {**given, **table, **asked}
    return tables


def _section_of(name: str, known: Sequence[str], keywords: Mapping[str, Any]) -> str:
    """The section that alone has an option."""
    found = [dotted.partition(".")[0] for dotted in dotted_names(name)]
    ways = [f"{section}={{'{name}': ...}}" for section in found]
    strategy = _strategy_named(keywords.get("strategy"))
    if strategy is not None and _has(strategy, name):
        ways.append(f"strategy={{'name': '{strategy}', '{name}': ...}}")
    if len(ways) > 1 or (ways and not found):
        raise ConfigError(f"keyword '{name}' belongs to a section; write {' or '.join(ways)}")
    if found:
        return found[0]
    owners = [owner for owner in STRATEGIES.names() if _has(owner, name)]
    every = [*known, *(option for section in known for option in options_of(section))]
    near = difflib.get_close_matches(name, every, n=1)
    hint = None if near else "'fedproto list options' prints all options by section"
    if owners:
        hint = f"it is an option of a strategy: {{'name': '{owners[0]}', '{name}': ...}}"
    raise ConfigError(unknown_name("keyword", name, every, hint))


def _strategy_named(given: Any) -> str | None:
    """The registered name of a strategy that was given in any form."""
    if isinstance(given, Options):
        return CHOICES["strategy"].name_of(type(given))
    name = given.get("name") if isinstance(given, Mapping) else given
    return name if isinstance(name, str) and name in STRATEGIES.names() else None


def _has(strategy: str, option: str) -> bool:
    return option in (item.name for item in fields(STRATEGIES.get(strategy)))
