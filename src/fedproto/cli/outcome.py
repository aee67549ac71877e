"""How a command that trained ends: never with success where nothing was learned."""

from __future__ import annotations

from collections.abc import Sequence

import typer

from fedproto.api.result import hardly_learned, refusals
from fedproto.cli.comparing import print_comparison
from fedproto.cli.tables import echo
from fedproto.store import RunStore

HARDLY_LEARNED = 1
"""The exit code when most updates of a run were refused, or its model never moved."""


def conclude(stores: Sequence[RunStore], *, quiet: bool) -> None:
    """Prints the comparison and what was refused; exits with `HARDLY_LEARNED` where that is so."""
    if not quiet:
        print_comparison([store.path for store in stores])
    failed = False
    for store in stores:
        records = store.records()
        complaint = refusals(records)
        if complaint is not None:
            echo(f"{store.config.title}: {complaint}", err=True)
        failed = failed or hardly_learned(records)
    if failed:
        echo("error: a model has hardly learned; see above and in rounds.jsonl", err=True)
        raise typer.Exit(HARDLY_LEARNED)
