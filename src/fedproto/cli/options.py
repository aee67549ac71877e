"""Options that several commands share."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer


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
