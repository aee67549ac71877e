"""Options that several commands share."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer


def _use_data_root(folder: Path | None) -> Path | None:
    if folder is not None:
        os.environ["FEDPROTO_DATA"] = str(folder)
    return folder


DataRoot = Annotated[
    Path | None,
    typer.Option(
        "--data-root",
        envvar="FEDPROTO_DATA",
        callback=_use_data_root,
        help="Folder of the downloaded data sets; a per-user cache by default.",
    ),
]
"""Sets the data root for the whole process; the command itself need not look at it."""
