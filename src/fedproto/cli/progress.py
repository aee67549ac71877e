"""Telling people and programs how far a sweep is."""

from __future__ import annotations

import json
import sys
import time
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
)

from fedproto.callback import Callback
from fedproto.cli.terminal import echo, plain
from fedproto.config import RunConfig
from fedproto.data.tasks import headline, is_share
from fedproto.store import RunStore
from fedproto.types import RoundRecord


@contextmanager
def progress_for(
    stores: Sequence[RunStore], as_json: bool = False, total: int | None = None
) -> Iterator[Callback]:
    """The callback that fits: records as JSON lines, live bars on a terminal, or a line at times.

    `total` are the rounds in all, where the stores do not say.
    """
    console = Console(stderr=True)
    done = sum(len(store.records()) for store in stores)
    if total is None:
        total = sum(store.config.schedule.rounds for store in stores)
    if as_json:
        yield JsonLines()
    elif console.is_terminal:
        with Bars(console) as bars:
            yield LiveBars(bars, total, done)
    else:
        yield Lines(total, done)


class Notices(Callback):
    """Says on standard error what a user should know, each thing once."""

    def __init__(self) -> None:
        self._said: set[str] = set()

    def on_notice(self, text: str) -> None:
        """Writes a line."""
        if text not in self._said:
            self._said.add(text)
            self._write(text)

    def _write(self, text: str) -> None:
        echo(text, err=True)


class Pace:
    """How long the rounds that are left will take, going by whole passes over all runs.

    The records of a pass arrive at once, so a time per record would swing with their number.
    """

    def __init__(self, total: int, done: int) -> None:
        self.total, self.done, self._before = total, done, done
        self._started = time.monotonic()

    def left(self) -> float | None:
        """Seconds, asked for between passes; None before the first is over."""
        if self.done == self._before:
            return None
        each = (time.monotonic() - self._started) / (self.done - self._before)
        return each * max(0, self.total - self.done)


class Lines(Notices):
    """A line with the time left after the first round, and then every so often."""

    EVERY_S = 30.0

    def __init__(self, total: int, done: int) -> None:
        super().__init__()
        self._pace, self._newest = Pace(total, done), ""
        self._due = 0.0

    def on_pass(self, num_jobs: int) -> None:
        """Says how far it is, where that is due."""
        del num_jobs
        left, now = self._pace.left(), time.monotonic()
        if left is not None and now >= self._due:
            done = f"round {self._pace.done} of {self._pace.total}"
            self._write(f"{done}, about {time_in_words(left)} left; {self._newest}")
            self._due = now + self.EVERY_S

    def on_round(self, config: RunConfig, record: RoundRecord) -> None:
        """Counts it."""
        self._pace.done += 1
        self._newest = newest_score(config, record) or self._newest


def time_in_words(seconds: float) -> str:
    """A duration with one unit, or two from an hour on."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def newest_score(config: RunConfig, record: RoundRecord) -> str:
    """The score of a round as tables show it, and whose it is."""
    metric = config.stop.metric or headline(record.metrics)
    score = record.metrics.get(metric)
    if score is None:
        return ""
    shown = f"{100 * score:.1f} %" if is_share(metric) else f"{score:.3f}"
    whose = f"{config.title}, δ {config.schedule.delta:g}, seed {config.seed}"
    return f"{metric} {shown} in round {record.round + 1} of {config.schedule.rounds}: {whose}"


class Bars(Progress):
    """Bars with their times, and below them a line of its own for what was heard last."""

    def __init__(self, console: Console) -> None:
        self.newest = ""
        super().__init__(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[left]}"),
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
        self._pace = Pace(total, done)
        self._rounds = bars.add_task("rounds", total=total, completed=done, left="")
        self._clients = bars.add_task("clients", total=1, left="")

    def on_pass(self, num_jobs: int) -> None:
        """Starts the clients' bar afresh, and says how long all rounds will take."""
        left = self._pace.left()
        if left is not None:
            self._bars.update(self._rounds, left=f"{time_in_words(left)} left")
        self._bars.reset(self._clients, total=num_jobs)

    def on_job(self) -> None:
        """Moves the clients' bar."""
        self._bars.advance(self._clients)

    def on_round(self, config: RunConfig, record: RoundRecord) -> None:
        """Moves the rounds' bar and shows the newest score, and whose it is."""
        self._pace.done += 1
        self._bars.advance(self._rounds)
        self._bars.newest = newest_score(config, record) or self._bars.newest

    def _write(self, text: str) -> None:
        self._bars.console.print(plain(text), highlight=False)


class JsonLines(Notices):
    """One JSON object a round on standard output."""

    def on_round(self, config: RunConfig, record: RoundRecord) -> None:
        """Prints the record with the run's title and seed."""
        line = {"run": config.title, "seed": config.seed, **asdict(record)}
        sys.stdout.write(json.dumps(line) + "\n")
        sys.stdout.flush()
