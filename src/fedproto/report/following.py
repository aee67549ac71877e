"""Reading a run again and again while it is written, each time only what is new.

Of a round only what the page shows is kept, so that the memory of a large sweep is bounded: its
scores and what was unusual; who took part goes into the attention map.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from fedproto.disk.files import explained, open_regular
from fedproto.errors import StoreError
from fedproto.measures.clients import PER_CLASS, PER_CLIENT
from fedproto.report.analysed import Scores
from fedproto.report.grids import AttentionMap
from fedproto.report.results import StoredRun
from fedproto.store import RunStore
from fedproto.store.sweeps import run_directories
from fedproto.types import RoundRecord

_CHUNK = 1 << 20
CLASS = "class: "
"""How the curve of a class that was scored in training is called among the metrics."""


class RunFollower:
    """One run directory.

    Attributes:
        records: The rounds so far, without cohorts and weights.
        scores: Of the newest model whose clients were scored in training; None where none was.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._described: object = None
        self._start_again()

    @property
    def run(self) -> StoredRun:
        """The run as the comparing functions want it."""
        return StoredRun(self.path, self.store.config, self.records)

    @property
    def stop_reason(self) -> str | None:
        """Why the run is over; None while it is not."""
        return self.store.reason_to_end(self.records)

    def update(self) -> None:
        """Reads what was written since the last time."""
        file = self.path / "rounds.jsonl"
        # Going back to a checkpoint puts another file in the place of this one.
        replaced = self._identity != _identity(file)
        if replaced or self._described != _identity(self.path / "run.json"):
            self._start_again()
        with (
            explained(file, " cannot be read", ""),
            contextlib.suppress(FileNotFoundError),
            open_regular(file) as lines,
        ):
            lines.seek(self._read)
            while chunk := lines.read(_CHUNK) + lines.readline():
                self._take(chunk)

    def _start_again(self) -> None:
        self.store = RunStore.open(self.path)
        self.records: list[RoundRecord] = []
        self.attention = AttentionMap(self.store.config.schedule.rounds)
        self.failures = 0
        self.scores: Scores | None = None
        self._described = _identity(self.path / "run.json")
        self._identity = _identity(self.path / "rounds.jsonl")
        self._read = 0
        self._reader = self.store.reader()

    def _take(self, chunk: bytes) -> None:
        # A last line without its end is still being written: it is read again the next time.
        self._read += chunk.rfind(b"\n") + 1
        for record in self._reader.read(chunk):
            self.attention.add(record)
            self.failures += len(record.failures)
            if PER_CLIENT in record.tables:
                self.scores = _scores(record)
            classes = record.tables.get(PER_CLASS, {})
            self.records.append(
                replace(
                    record,
                    metrics={
                        **record.metrics,
                        **{f"{CLASS}{name}": value for name, value in classes.items()},
                    },
                    tables={},
                    cohort=[],
                    stragglers=[],
                    dropped=[],
                    epochs={},
                    attention={},
                    failures={},
                )
            )


class Followers:
    """All runs in and below some directories, those included that begin later."""

    def __init__(self, paths: Iterable[Path]) -> None:
        self.paths = list(paths)
        self._known: dict[Path, RunFollower] = {}

    def update(self, *, forgiving: bool = False) -> tuple[list[RunFollower], list[str]]:
        """Reads what is new of all runs; a forgiving one says what it left out and why."""
        problems = []
        found: dict[Path, RunFollower] = {}
        for path in self.paths:
            if not path.exists():
                raise StoreError(f"{path} does not exist")
            for directory in run_directories(path):
                try:
                    follower = self._known.get(directory) or RunFollower(directory)
                    follower.update()
                except StoreError as error:
                    if not forgiving:
                        raise
                    problems.append(str(error))
                else:
                    found[directory] = follower
        self._known = found
        return list(found.values()), problems


def _scores(record: RoundRecord) -> Scores:
    return Scores(
        round=record.round + 1,
        measure="miou" if "mean_client_miou" in record.metrics else "accuracy",
        clients={int(client): value for client, value in record.tables[PER_CLIENT].items()},
        classes=dict(record.tables.get(PER_CLASS, {})),
    )


def _identity(path: Path) -> object:
    """Tells whether a file was replaced by another; not whether it grew."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return status.st_dev, status.st_ino
