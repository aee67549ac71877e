"""The generated pages of the reference: options, strategies and the command line.

Everything is read from the code, so nothing here can be out of date. `hooks.py` puts the pages into
the site; on a code host, `fedproto list` and `--help` print the same.

python docs/tools/reference.py reference/command-line
"""

from __future__ import annotations

import inspect
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from click import Argument, Command, Group, Option

from fedproto import Centralized
from fedproto.cli.app import COMMANDS, command
from fedproto.cli.inspecting import Entry, entries, registries
from fedproto.strategies.base import personal_memory
from fedproto.strategies.values import Declarations, Setting

RESULTS = Path(__file__).resolve().parents[2] / "results"

CHOSEN = {"data": "datasets", "model": "models"}
"""Sections whose options depend on a name, and the kind of things that the name chooses."""


def option_pages() -> dict[str, str]:
    """A page of options per section, by the section's name."""
    pages = {}
    for entry in entries("options"):
        pages[entry.name] = f"{entry.summary}\n\n{_options(entry)}"
    for section, kind in CHOSEN.items():
        parts = ["`name` chooses one of these. The other options are its own."]
        parts += [_described(entry) for entry in entries(kind)]
        pages[section] = "\n\n".join(parts)
    how = (
        "In a recipe: `[{0}]`. On the command line: `--set {0}.option=value`. In Python:"
        ' `{0}={{"option": value}}`.'
    )
    return {
        name: f"# Options: {name}\n\n{how.format(name)}\n\n{text}\n" for name, text in pages.items()
    }


def sections() -> str:
    """The table of all sections."""
    known = {entry.name: entry.summary for entry in entries("options")}
    known |= {name: f"Which of the {kind}, and its options." for name, kind in CHOSEN.items()}
    rows = [f"| [`{name}`](options/{name}.md) | {text} |" for name, text in known.items()]
    return "\n".join(["| Section | Content |", "|---|---|", *rows])


def strategies() -> str:
    """The table of the strategies, and the options of each."""
    lines = [
        "| Name | Method | Kept by the server | Kept by a client | Sent besides the weights |",
        "|---|---|---|---|---|",
    ]
    known = registries()["strategies"]
    for name in known.names():
        strategy = known.get(name)()
        server = strategy.server_memory(_SETTING)
        client = {**strategy.client_memory(_SETTING), **personal_memory(strategy, _SETTING)}
        cells = (_groups(server), _groups(client), _groups(strategy.payload(_SETTING, 10)))
        lines.append(f"| [`{name}`](#{name}) | {_method(known.get(name))} | {' | '.join(cells)} |")
    text = ["\n".join(lines), "Tensors marked *broadcast* are sent to clients with the weights."]
    for entry in entries("strategies"):
        cls = known.get(entry.name)
        text += [_described(entry, level=2, rest=_paragraphs(cls))]
    return "\n\n".join(text) + "\n"


def command_line() -> str:
    """Every command with its arguments and options."""
    return "\n\n".join(part for name in COMMANDS for part in _command(name, command(name))) + "\n"


def _command(path: str, what: Command) -> Iterator[str]:
    yield f"## {path}"
    yield inspect.cleandoc(what.help or "").replace("\f", "")
    if isinstance(what, Group):
        for name, inner in what.commands.items():
            yield from _command(f"{path} {name}", inner)
        return
    given = " ".join(one.make_metavar(_context(what)) for one in what.params if _is_argument(one))
    yield f"```console\n$ fedproto {path} [OPTIONS] {given}".rstrip() + "\n```"
    lines = ["| Option | Meaning |", "|---|---|"]
    for one in what.params:
        if isinstance(one, Option) and not one.hidden:
            names = ", ".join(f"`{name}`" for name in (*one.opts, *one.secondary_opts))
            lines.append(f"| {names} | {_cell(one.help or '')} |")
        elif _is_argument(one):
            name = one.make_metavar(_context(what)).removesuffix("...").strip("[]")
            lines.append(f"| `{name}` | {_cell(getattr(one, 'help', '') or '')} |")
    if len(lines) > 2:
        yield "\n".join(lines)


def _context(what: Command):  # noqa: ANN202 - click's own class
    return what.make_context("fedproto", [], resilient_parsing=True)


def _is_argument(one: object) -> bool:
    return isinstance(one, Argument)


_SETTING = Setting(
    {"fc.weight": torch.zeros(3, 2), "fc.bias": torch.zeros(3)},
    num_classes=3,
    num_clients=4,
    features=(2, 1),
    head=("fc.weight", "fc.bias"),
)
"""A small model, to ask strategies which tensors they keep and send."""


def _groups(declared: Declarations) -> str:
    """The groups of declared tensors; those that are broadcast say so."""
    groups = {
        name.partition("/")[0]: " (broadcast)" if one.broadcast else ""
        for name, one in declared.items()
    }
    return ", ".join(f"{name}{mark}" for name, mark in groups.items()) or "–"


def _method(cls: type) -> str:
    """Name and paper, from the first line of the module."""
    first = (inspect.getmodule(cls).__doc__ or "").partition("\n")[0]
    found = re.match(r"[^(]*\([^)]*\d{4}[^)]*\)", first)
    return _cell(found.group()) if found and cls is not Centralized else "–"


def _paragraphs(cls: type) -> str:
    """A docstring after its first line, up to its first heading such as "Attributes"."""
    text = "\n".join((inspect.getdoc(cls) or "").splitlines()[1:]).strip()
    return re.split(r"\n\n(?=\w+:\n)", text)[0].replace("``", "`")


def _described(entry: Entry, *, level: int = 2, rest: str = "") -> str:
    parts = [f"{'#' * level} {entry.name}", entry.summary.replace("``", "`"), rest]
    return "\n\n".join(part for part in [*parts, _options(entry) if entry.options else ""] if part)


def _options(entry: Entry) -> str:
    lines = ["| Option | Default | Meaning |", "|---|---|---|"]
    for option in entry.options:
        default = "none" if option.default is None else f"`{option.default!r}`"
        lines.append(f"| `{option.name}` | {default} | {_cell(f'{option.help} ({option.type})')} |")
    return "\n".join(lines)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def licences() -> str:
    """The table of the data sets that are downloaded, with the terms of their owners."""
    known = registries()["datasets"]
    lines = ["| Name | Content | Terms |", "|---|---|---|"]
    lines += [
        f"| `{entry.name}` | {_cell(entry.summary)} | {_cell(terms)} |"
        for entry in entries("datasets")
        if (terms := known.get(entry.name).licence)
    ]
    return "\n".join(lines) + "\n"


def compute() -> str:
    """The table of hours behind each published table."""
    lines = ["| Table | Runs | Rounds | GPU hours | CPU hours |", "|---|---|---|---|---|"]
    for path in sorted(RESULTS.glob("*/*.json")):
        runs = json.loads(path.read_text(encoding="utf-8")).get("runs", [])
        if runs:
            hours = {True: 0.0, False: 0.0}
            for run in runs:
                hours[any("cuda" in device for device in run["devices"])] += run["seconds"] / 3600
            rounds = sum(run["rounds"] for run in runs)
            name = path.relative_to(RESULTS).with_suffix("")
            lines.append(
                f"| {name} | {len(runs)} | {rounds:,} | {hours[True]:.2f} | {hours[False]:.2f} |"
            )
    return "\n".join(lines) + "\n"


PAGES = {
    "evidence/compute.md": compute,
    "reference/data.md": licences,
    "reference/options.md": sections,
    "reference/strategies.md": strategies,
    "reference/command-line.md": command_line,
}
"""Pages of the repository that go on with generated text."""


if __name__ == "__main__":
    sys.stdout.write(PAGES[f"{sys.argv[1]}.md"]())
