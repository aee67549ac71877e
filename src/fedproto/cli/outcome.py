"""How a command that trained ends: never with success where nothing was learned."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import typer

from fedproto.cli.comparing import print_comparison
from fedproto.cli.tables import echo
from fedproto.store import RunStore
from fedproto.types import RoundRecord

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


def hardly_learned(records: Sequence[RoundRecord]) -> bool:
    """Whether no update, or fewer than were refused, entered the model."""
    used = sum(len(record.epochs) for record in records)
    refused = sum(len(record.failures) for record in records)
    return bool(records) and (used == 0 or refused > used)


def refusals(records: Sequence[RoundRecord]) -> str | None:
    """How many updates were not used, and the reason most of them share; None when all were."""
    used = sum(len(record.epochs) for record in records)
    reasons = Counter(reason for record in records for reason in record.failures.values())
    if reasons:
        (reason, _), *_ = reasons.most_common(1)
        refused = reasons.total()
        return f"{refused:,} of {used + refused:,} updates were not used; most often: {reason}"
    if records and used == 0:
        return records[-1].note
    return None
