"""Everything that can be set, gathered from the code: for `fedproto list` and the docs."""

from __future__ import annotations

import inspect
from typing import Any

from fedproto.config import CHOICES, SECTIONS
from fedproto.engines.base import ENGINES
from fedproto.errors import ConfigError, unknown_name
from fedproto.measures.base import MEASURES
from fedproto.options import Options, describe
from fedproto.options.registry import Registry
from fedproto.options.sources import Entry, summaries
from fedproto.store.sinks import SINKS

KINDS: dict[str, Registry[Any]] = {
    "strategies": CHOICES["strategy"],
    "datasets": CHOICES["data"],
    "models": CHOICES["model"],
    "engines": ENGINES,
    "measures": MEASURES,
    "sinks": SINKS,
}
RECIPES, OPTIONS = "recipes", "options"
_KIND_OF = {"strategy": "strategies", "data": "datasets", "model": "models"}


def entries(kind: str) -> list[Entry]:
    """All of a kind such as ``strategies``; all sections for ``options``; one section; one name."""
    kind = _KIND_OF.get(kind, kind)
    if kind not in (*KINDS, *SECTIONS, RECIPES, OPTIONS):
        found = [_described(kind, one.get(kind)) for one in KINDS.values() if kind in one.names()]
        if found:
            return found
    if kind == RECIPES:
        return summaries(kind)
    if kind == OPTIONS:
        return [_section(name) for name in SECTIONS]
    if kind in SECTIONS:
        return [_section(kind)]
    if kind not in KINDS:
        names = [name for registry in KINDS.values() for name in registry.names()]
        known = [*KINDS, RECIPES, OPTIONS, *SECTIONS, *names]
        raise ConfigError(unknown_name("kind, section or name", kind, known))
    found = [_described(name, KINDS[kind].get(name)) for name in KINDS[kind].names()]
    if kind == "engines":
        found = [summaries(kind)[0], *found, _section("engine")]
    return found


def as_markdown() -> str:
    """The page of all options."""
    parts = [
        "# Options",
        "Everything that a recipe, `--set` or a keyword of `fedproto.run` can say. This page is"
        " made from the code: `fedproto list options --markdown`; a section alone is shown by"
        " `fedproto list train`. In a recipe a section is a table (`[train]`), on the command line"
        " its name goes before the option (`--set train.lr=0.1`), and in Python it is a dictionary"
        ' (`train={"lr": 0.1}`), or the option by its own name where only one section has it'
        " (`lr=0.1`).",
        "`seed` and `label` stand above all sections: the seed of initial weights, cohorts,"
        " stragglers and batch orders, and what to call the run in tables.",
    ]
    for entry in entries(OPTIONS):
        parts += [f"## {entry.name}", entry.summary, _table(entry)]
    for section, kind in _KIND_OF.items():
        parts += [f"## {section}", "`name` is one of these; the other options are its own."]
        for entry in entries(kind):
            parts += [f"### {section} {entry.name}", entry.summary]
            parts += [_table(entry)] if entry.options else []
    return "\n\n".join(parts) + "\n"


def _section(name: str) -> Entry:
    return _described(name, SECTIONS[name])


def _described(name: str, cls: type) -> Entry:
    options = describe(cls) if issubclass(cls, Options) else []
    return Entry(name, (inspect.getdoc(cls) or "").splitlines()[0], options)


def _table(entry: Entry) -> str:
    lines = ["| option | default | meaning |", "|---|---|---|"]
    for option in entry.options:
        default = "none" if option.default is None else f"`{option.default!r}`"
        meaning = f"{option.help} ({option.type})".replace("|", "\\|")
        lines.append(f"| `{option.name}` | {default} | {meaning} |")
    return "\n".join(lines)
