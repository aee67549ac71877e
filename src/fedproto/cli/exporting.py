"""The command that gets a trained model out of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedproto.api import load
from fedproto.api.export import ALWAYS, FORMATS, export, loading_code
from fedproto.cli.options import DataRoot
from fedproto.cli.tables import echo
from fedproto.disk.files import Folder, explained


def export_run(
    run: Annotated[Path, typer.Argument(help="Directory of a run.")],
    out: Annotated[
        Path | None, typer.Option(help="Folder for the files; 'export' in the run by default.")
    ] = None,
    format_: Annotated[
        list[str] | None,
        typer.Option(
            "--format", help=f"May be given several times: {', '.join(FORMATS)}; the first two."
        ),
    ] = None,
    data_root: DataRoot = None,
) -> None:
    """Write a run's newest model for use elsewhere, with a model card.

    The weights have the names that the module itself gives them.
    """
    del data_root
    result = load(run)
    if out is None:
        with explained(run, " cannot be written", "; choose another folder with --out"):
            out = Folder(run).make("export")
    for path in export(result, out, format_ or ALWAYS):
        echo(f"wrote {path}")
    echo(f"\nTo load it:\n\n{loading_code(result)}")
