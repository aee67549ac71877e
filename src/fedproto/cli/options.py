"""Options that several commands share."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer


def _use_data_root(context: typer.Context, folder: Path | None) -> Path | None:
    before = os.environ.get("FEDPROTO_DATA")
    if folder is not None:
        os.environ["FEDPROTO_DATA"] = str(folder)
        context.call_on_close(lambda: _put_back(before))
    return folder


def _put_back(before: str | None) -> None:
    if before is None:
        os.environ.pop("FEDPROTO_DATA", None)
    else:
        os.environ["FEDPROTO_DATA"] = before


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
