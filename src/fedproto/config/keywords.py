"""Keywords of a program as the tables of a recipe: single options find their sections."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from fedproto.config.run import RunConfig, dotted_names, options_of
from fedproto.errors import ConfigError, unknown_name
from fedproto.options import Options, options_to_dict

ROUNDS = 50
"""How many rounds, when nobody says."""


def as_tables(keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Keywords, sections or single options by their own names, as the tables of a recipe."""
    known = [item.name for item in fields(RunConfig)]
    tables = {name: value for name, value in keywords.items() if name in known}
    single: dict[str, dict[str, Any]] = {"schedule": {"rounds": ROUNDS}}
    for name, value in keywords.items():
        if name not in known:
            section = _section_of(name, known)
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


def _section_of(name: str, known: Sequence[str]) -> str:
    found = dotted_names(name)
    if not found:
        every = [option for section in known for option in options_of(section)]
        raise ConfigError(unknown_name("keyword", name, [*known, *every]))
    section = found[0].partition(".")[0]
    if len(found) > 1 and section not in ("train", "schedule"):
        raise ConfigError(
            f"{name} could be {' or '.join(found)}; write {section}={{'{name}': ...}}"
        )
    return section
