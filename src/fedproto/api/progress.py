"""Progress of training: live bars on a terminal, elsewhere a line at intervals."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from fedproto.callback import Callback
from fedproto.config import RunConfig
from fedproto.data.tasks import headline, is_share
from fedproto.errors import printable
from fedproto.store import RunStore
from fedproto.types import RoundRecord


@contextmanager
def progress_for(stores: Sequence[RunStore], total: int | None = None) -> Iterator[Callback]:
    """The progress callback for standard error: bars on a terminal, else lines.

    `total` is the number of rounds in all, where it is not the sum of those of the stores.
    """
    console = Console(stderr=True)
    done = sum(len(store.records()) for store in stores)
    if total is None:
        total = sum(store.config.schedule.rounds for store in stores)
    shown = Shown(console, total, done, live=console.is_terminal or console.is_jupyter)
    with Live(shown.bars, console=console) if shown.live else nullcontext():
        yield shown


class Shown(Callback):
    """Notices, each once, and the progress of training.

    Live: a bar for the rounds of all runs, one for the clients of the round, the last score.
    Otherwise a line after the first round, and whenever there was none for a while.

    The time left goes by whole passes over all runs: the records of a pass arrive at once, so a
    time per record would swing with their number.

    Attributes:
        bars: What is to be shown live.
    """

    EVERY_S = 30.0

    def __init__(self, console: Console, total: int, done: int, *, live: bool) -> None:
        self.live = live
        self._console, self._said, self._before = console, set[str](), float(done)
        self._started, self._newest = time.monotonic(), Text()
        self._due = self._started + self.EVERY_S
        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[left]}"),
            expand=True,
        )
        for name, begun in (("rounds", done), ("clients", 0)):
            self._bars.add_task(name, total=total, completed=begun, left="")
        self._rounds, self._clients = self._bars.tasks
        self.bars = Group(self._bars, self._newest)

    def on_notice(self, text: str) -> None:
        """Writes a line."""
        if text not in self._said:
            self._said.add(text)
            self._write(text)

    def on_pass(self, num_jobs: int) -> None:
        """Estimates the time of all rounds, to be shown once it is known."""
        known, left = self._rounds.fields["left"], self._left()
        if not known:  # what is done once, and the first pass, which warms up, are not repeated
            self._started, self._before = time.monotonic(), self._rounds.completed
        self._bars.update(self._rounds.id, left=left)
        self._bars.reset(self._clients.id, total=num_jobs)
        self._tell(due=bool(left) and not known)

    def on_job(self) -> None:
        """Moves the clients' bar."""
        self._bars.advance(self._clients.id)
        self._tell()

    def on_round(self, config: RunConfig, record: RoundRecord) -> None:
        """Moves the rounds' bar and keeps the newest score, and whose it is."""
        self._bars.advance(self._rounds.id)
        self._newest.plain = printable(newest_score(config, record)) or self._newest.plain

    def _left(self) -> str:
        """Time for the rounds that are left; empty before the first pass is over."""
        new = self._rounds.completed - self._before
        if not new:
            return ""
        each = (time.monotonic() - self._started) / new
        return f"about {time_in_words(each * (self._rounds.remaining or 0))} left"

    def _tell(self, *, due: bool = False) -> None:
        """Writes a line of progress without a terminal, if it is due."""
        if self.live or not (due or time.monotonic() >= self._due):
            return
        done = [
            f"{name} {bar.completed:.0f} of {bar.total:.0f}"
            for name, bar in (("round", self._rounds), ("client", self._clients))
            if bar.completed or bar is self._rounds
        ]
        told = [", ".join(filter(None, [*done, self._rounds.fields["left"]])), self._newest.plain]
        self._write("; ".join(filter(None, told)))
        self._due = time.monotonic() + self.EVERY_S

    def _write(self, text: str) -> None:
        self._console.print(Text(printable(text)), soft_wrap=True)


def time_in_words(seconds: float) -> str:
    """A duration with one unit, or two from an hour on."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def newest_score(config: RunConfig, record: RoundRecord) -> str:
    """The score of a round as tables show it, and the name of its run."""
    metric = config.stop.metric or headline(record.metrics)
    if metric not in record.metrics:  # where test data is not read
        metric = f"validation_{metric}"
    score = record.metrics.get(metric)
    if score is None:
        return ""
    shown = f"{100 * score:.1f} %" if is_share(metric) else f"{score:.3f}"
    whose = f"{config.title}, δ {config.schedule.delta:g}, seed {config.seed}"
    return f"{metric} {shown} in round {record.round + 1} of {config.schedule.rounds}: {whose}"
