"""Telling people and programs how far a sweep is."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict

from rich.console import Console, RenderableType
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from fedproto.cli.tables import echo, plain
from fedproto.config import RunConfig
from fedproto.data.tasks import headline
from fedproto.rounds import Watcher
from fedproto.store import RunStore
from fedproto.types import RoundRecord


@contextmanager
def progress_for(stores: Sequence[RunStore], as_json: bool = False) -> Iterator[Watcher]:
    """The watcher that fits: records as JSON lines, live bars on a terminal, silence elsewhere."""
    console = Console(stderr=True)
    if as_json:
        yield JsonLines()
    elif console.is_terminal:
        total = sum(store.config.schedule.rounds for store in stores)
        done = sum(len(store.records()) for store in stores)
        with Bars(console) as bars:
            yield LiveBars(bars, total, done)
    else:
        yield Notices()


class Notices(Watcher):
    """Says on standard error what a user should know, each thing once."""

    def __init__(self) -> None:
        self._said: set[str] = set()

    def notice(self, text: str) -> None:
        """Writes a line."""
        if text not in self._said:
            self._said.add(text)
            self._write(text)

    def _write(self, text: str) -> None:
        echo(text, err=True)


class Bars(Progress):
    """Bars with their times, and below them a line of its own for what was heard last."""

    def __init__(self, console: Console) -> None:
        self.newest = ""
        super().__init__(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
            expand=True,
        )

    def get_renderables(self) -> Iterable[RenderableType]:
        """The bars, then the line; a long one goes on in the next."""
        yield self.make_tasks_table(self.tasks)
        yield plain(self.newest)


class LiveBars(Notices):
    """A bar for the rounds of all runs and one for the clients of the current round."""

    def __init__(self, bars: Bars, total: int, done: int) -> None:
        super().__init__()
        self._bars = bars
        self._rounds = bars.add_task("rounds", total=total, completed=done)
        self._clients = bars.add_task("clients", total=1)

    def round_started(self, num_jobs: int) -> None:
        """Starts the clients' bar afresh."""
        self._bars.reset(self._clients, total=num_jobs)

    def job_done(self) -> None:
        """Moves the clients' bar."""
        self._bars.advance(self._clients)

    def round_done(self, config: RunConfig, records: Sequence[RoundRecord]) -> None:
        """Moves the rounds' bar and shows the newest score, and whose it is."""
        record = records[-1]
        metric = config.stop.metric or headline(record.metrics)
        score = record.metrics.get(metric)
        self._bars.advance(self._rounds)
        if score is not None:
            whose = f"{config.title}, δ {config.schedule.delta:g}, seed {config.seed}"
            after = f"round {record.round + 1} of {config.schedule.rounds}"
            self._bars.newest = f"{metric} {score:.3f} in {after}: {whose}"

    def _write(self, text: str) -> None:
        self._bars.console.print(plain(text), highlight=False)


class JsonLines(Notices):
    """One JSON object a round on standard output."""

    def round_done(self, config: RunConfig, records: Sequence[RoundRecord]) -> None:
        """Prints the record with the run's title and seed."""
        line = {"run": config.title, "seed": config.seed, **asdict(records[-1])}
        sys.stdout.write(json.dumps(line) + "\n")
        sys.stdout.flush()
