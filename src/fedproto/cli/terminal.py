"""Lines and tables for the terminal, and the options that several commands share.

Untrusted text cannot control the terminal. Tables fit its width: names stay readable, no number is
cut, and the caption names hidden columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from fedproto.errors import printable

if TYPE_CHECKING:
    from fedproto.api.table import Table

WIDEST = 160
"""For pipes and files, which have no width of their own."""

_NAME_ROOM = 34
_ALWAYS_SHOWN = 3
"""Columns: a name, a score, a difference."""


def echo(text: str, *, err: bool = False, nl: bool = True) -> None:
    """Prints lines, control characters escaped."""
    typer.echo("\n".join(map(printable, text.split("\n"))), err=err, nl=nl)


def plain(text: object, style: str = "") -> Text:
    """Text for rich, without markup and with control characters escaped."""
    return Text(printable(text), style)


def wide_console() -> Console:
    """Standard output: as wide as the terminal, or `WIDEST` for a pipe."""
    console = Console()
    return console if console.is_terminal else Console(width=WIDEST)


def print_table(table: Table) -> None:
    """Prints a table, without the last columns if they do not fit the terminal."""
    console = wide_console()
    head, *rows = table.cells()
    kept = _fitting([head, *rows], console.width)
    hidden = head[kept:]
    notes = [table.caption] if table.caption else []
    if hidden:
        notes.append(f"hidden at this width: {', '.join(hidden)}")
    shown = RichTable(
        title=plain(table.title, "table.title") if table.title else None,
        caption=plain("; ".join(notes), "table.caption") if notes else None,
    )
    shown.add_column(plain(head[0]), overflow="fold")
    for name in head[1:kept]:
        shown.add_column(plain(name), justify="right", no_wrap=True)
    for index, row in enumerate(rows):
        if table.begins_section(index):
            shown.add_section()
        shown.add_row(*map(plain, row[:kept]))
    console.print(shown)


def _fitting(cells: Sequence[Sequence[str]], width: int) -> int:
    """The number of columns that there is room for."""
    widths = [3 + max(map(cell_len, column)) for column in zip(*cells, strict=True)]
    widths[0] = 4 + min(widths[0] - 3, _NAME_ROOM)
    kept = len(widths)
    while kept > _ALWAYS_SHOWN and sum(widths[:kept]) > width:
        kept -= 1
    return kept


Best = Annotated[
    bool, typer.Option("--best", help="Use the model with the best validation score (store.best).")
]
Directories = Annotated[list[Path], typer.Argument(help="Runs, sweeps or folders of them.")]
Metric = Annotated[
    str | None, typer.Option(help="Score to compare by; default: the task's main score.")
]
Target = Annotated[
    float | None, typer.Option(help="Also show the rounds until this score is reached.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
