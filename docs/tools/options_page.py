"""Prints docs/reference/options.md: all options with their meaning, from the code.

python docs/tools/options_page.py > docs/reference/options.md
"""

from __future__ import annotations

import sys

from fedproto.cli.inspecting import KIND_OF, OPTIONS, entries
from fedproto.options import Entry


def as_markdown() -> str:
    """The page of all options."""
    parts = [
        "# Options",
        "Every option of a recipe, of `--set` and of the keywords of `fedproto.run`. This page is"
        " made from the code\n(`docs/tools/options_page.py`); `fedproto list train` shows one"
        " section. In a recipe a section is a table\n(`[train]`), on the command line its name goes"
        " before the option (`--set train.lr=0.1`), and in Python it is a\ndictionary"
        ' (`train={"lr": 0.1}`); the common ones are keywords of their own (`lr=0.1`).',
        "`seed` and `label` stand above all sections: the seed of initial weights, cohorts,"
        " stragglers and batch\norders, and the run's name in tables.",
    ]
    for entry in entries(OPTIONS):
        parts += [f"## {entry.name}", entry.summary, table(entry)]
    for section, kind in KIND_OF.items():
        parts += [f"## {section}", "`name` is one of these; the other options are its own."]
        for entry in entries(kind):
            parts += [f"### {section} {entry.name}", entry.summary]
            parts += [table(entry)] if entry.options else []
    return "\n\n".join(parts) + "\n"


def table(entry: Entry) -> str:
    """The options of an entry, a row each."""
    lines = ["| option | default | meaning |", "|---|---|---|"]
    for option in entry.options:
        default = "none" if option.default is None else f"`{option.default!r}`"
        meaning = f"{option.help} ({option.type})".replace("|", "\\|")
        lines.append(f"| `{option.name}` | {default} | {meaning} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.stdout.write(as_markdown())
