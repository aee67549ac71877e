"""Telling a program how far its runs are."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeAlias

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from fedproto.config import RunConfig
from fedproto.errors import printable
from fedproto.rounds import Watcher
from fedproto.types import RoundRecord

OnRound: TypeAlias = Callable[[RunConfig, RoundRecord], None]
OnProgress: TypeAlias = Callable[[int, int], None]

_log = logging.getLogger("fedproto")


class Callbacks(Watcher):
    """Tells a program of rounds, and its log of how they are run."""

    def __init__(
        self, done: int, total: int, on_round: OnRound | None, on_progress: OnProgress | None
    ) -> None:
        self._done, self._total = done, total
        self._on_round, self._on_progress = on_round, on_progress

    def notice(self, text: str) -> None:
        """Writes it to the log."""
        _log.info("%s", printable(text))

    def round_done(self, config: RunConfig, records: Sequence[RoundRecord]) -> None:
        """Passes the new record on."""
        self._done += 1
        if self._on_round is not None:
            self._on_round(config, records[-1])
        if self._on_progress is not None:
            self._on_progress(self._done, self._total)


@contextmanager
def progress_bar(progress: bool | OnProgress, total: int) -> Iterator[OnProgress | None]:
    """What is told of rounds done: a bar, the given function, or nothing."""
    if not isinstance(progress, bool):
        yield progress
        return
    if not progress:
        yield None
        return
    columns = TextColumn("rounds"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns) as bars:
        task = bars.add_task("rounds", total=total)
        yield lambda done, total: bars.update(task, completed=done, total=total)
