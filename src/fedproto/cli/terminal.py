"""Lines and tables for the terminal, and the options that several commands share.

Text from outside cannot steer the terminal. Tables fit it: names stay readable, no number is cut,
and a column without room is named below.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fedproto.errors import printable

WIDEST = 160
"""For pipes and files, which have no width of their own."""

_NAME_ROOM = 34


def echo(text: str, *, err: bool = False, nl: bool = True) -> None:
    """Prints lines, control characters escaped."""
    typer.echo("\n".join(map(printable, text.split("\n"))), err=err, nl=nl)


def plain(text: object, style: str = "") -> Text:
    """Text for rich as it is: without markup, control characters escaped."""
    return Text(printable(text), style)


def print_table(
    rows: Sequence[str],
    columns: Mapping[str, Sequence[str]],
    *,
    least: Sequence[str] = (),
    sections: Sequence[object] = (),
    title: str | None = None,
    caption: str = "",
) -> None:
    """Prints a table whose first column names the rows.

    Columns of `least` may be left out where there is no room, first ones first. A line is drawn
    where the value in `sections` changes.
    """
    console = Console()
    rows, least = list(map(printable, rows)), list(map(printable, least))
    columns = {printable(name): list(map(printable, cells)) for name, cells in columns.items()}
    width = console.width if console.is_terminal else WIDEST
    kept, left_out = _fitting(rows, columns, least, width)
    if left_out:
        caption = "; ".join(filter(None, [caption, f"no room for {', '.join(left_out)}"]))
    table = Table(
        title=None if title is None else plain(title, "table.title"),
        caption=plain(caption, "table.caption") if caption else None,
    )
    table.add_column("run", overflow="fold")
    for name in kept:
        table.add_column(plain(name), justify="right", no_wrap=True)
    for index, row in enumerate(rows):
        if sections and index and sections[index] != sections[index - 1]:
            table.add_section()
        table.add_row(*map(plain, [row, *(columns[name][index] for name in kept)]))
    (console if console.is_terminal else Console(width=WIDEST)).print(table)


def _fitting(
    rows: Sequence[str], columns: Mapping[str, Sequence[str]], least: Sequence[str], width: int
) -> tuple[list[str], list[str]]:
    """The columns that there is room for, in order, and the others."""
    widths = {
        name: 3 + max(map(cell_len, [name, *cells]), default=0) for name, cells in columns.items()
    }
    longest = max(map(cell_len, ["run", *rows]), default=0)
    room = width - 4 - min(longest, _NAME_ROOM)
    kept = {name for name in columns if name not in least}
    room -= sum(widths[name] for name in kept)
    for name in reversed(least):  # what matters most is let in first
        if name in columns and widths[name] <= room:
            kept.add(name)
            room -= widths[name]
    return [name for name in columns if name in kept], [n for n in columns if n not in kept]


def set_for_command(context: typer.Context, variable: str, value: str) -> None:
    """Sets an environment variable while a command runs."""
    before = os.environ.get(variable)
    os.environ[variable] = value
    context.call_on_close(lambda: _put_back(variable, before))


def _use_data_root(context: typer.Context, folder: Path | None) -> Path | None:
    if folder is not None:
        set_for_command(context, "FEDPROTO_DATA", str(folder))
    return folder


def _put_back(variable: str, before: str | None) -> None:
    if before is None:
        os.environ.pop(variable, None)
    else:
        os.environ[variable] = before


DataRoot = Annotated[
    Path | None,
    typer.Option(
        "--data-root",
        envvar="FEDPROTO_DATA",
        callback=_use_data_root,
        help="Folder of the downloaded data sets; a per-user cache by default.",
    ),
]
"""Sets the data root while a command runs; the command itself need not look at it."""

Directories = Annotated[list[Path], typer.Argument(help="Runs, sweeps or folders of them.")]
Metric = Annotated[
    str | None, typer.Option(help="The score to compare by; the task's main one by default.")
]
Target = Annotated[float | None, typer.Option(help="Also show when this score is reached.")]
AsJson = Annotated[bool, typer.Option("--json", help="As JSON.")]
