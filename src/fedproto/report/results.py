"""Reading finished or unfinished runs and their curves.

Curves are smoothed by a moving average over a tenth of the rounds, as in the paper.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedproto.analysis.runs import AttentionSpread, attention_spread
from fedproto.config import RunConfig
from fedproto.data import Federation, data_root
from fedproto.data.tasks import headline
from fedproto.errors import StoreError
from fedproto.store import RunStore
from fedproto.store.sweeps import found_in
from fedproto.types import RoundRecord

WINDOW = 0.1


@dataclass(frozen=True)
class StoredRun:
    """A run as read from its directory."""

    path: Path
    config: RunConfig
    records: list[RoundRecord]

    def curve(self, metric: str) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Rounds (counted from 1) at which a metric was taken, and its values."""
        points = [
            (record.round + 1, record.metrics[metric])
            for record in self.records
            if metric in record.metrics
        ]
        rounds = np.array([round_ for round_, _ in points], dtype=np.int64)
        return rounds, np.array([value for _, value in points], dtype=np.float64)

    def smoothed(
        self, metric: str, width: int | None = None
    ) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """The curve as a moving average over the last rounds: `width` or a tenth of the run's."""
        rounds, values = self.curve(metric)
        width = width or smoothing_width(self.config.schedule.rounds)
        starts = np.searchsorted(rounds, rounds - width, side="right")
        means = [values[start : end + 1].mean() for end, start in enumerate(starts)]
        return rounds, np.array(means, dtype=np.float64)

    def federation(self) -> Federation:
        """Its data, loaded now."""
        assert self.config.data is not None  # noqa: S101 - recipes name their data
        return self.config.data.load(data_root())

    def attention_spread(self) -> AttentionSpread | None:
        """How far from equal the clients' weights were."""
        return attention_spread(self.records)

    def final(self, metric: str) -> float | None:
        """The end of the smoothed curve, which is what tables show; None without a test."""
        rounds, values = self.curve(metric)
        if not len(rounds):
            return None
        width = smoothing_width(self.config.schedule.rounds)
        return float(values[rounds > rounds[-1] - width].mean())


def smoothing_width(rounds: int, share: float = WINDOW) -> int:
    """How many rounds a moving average over a share of them spans; halves count up."""
    return max(1, math.floor(share * rounds + 0.5))


def find_runs(
    paths: Iterable[Path], notify: Callable[[str], None] | None = None
) -> list[StoredRun]:
    """All runs in and below some directories; without the unreadable if one is told."""
    found: list[StoredRun] = []
    unread: list[StoreError] = []
    for directory in found_in(paths):
        try:
            store = RunStore.open(directory, to_compare=True)
            found.append(StoredRun(directory, store.config, store.records()))
        except StoreError as error:
            unread.append(error)
    if unread and (notify is None or not found):
        raise unread[0]
    for problem in unread:
        assert notify is not None  # noqa: S101 - checked above
        notify(f"left out: {problem}")
    return found


def main_score(runs: Iterable[StoredRun]) -> str:
    """The score by which some runs are compared first."""
    return headline(name for run in runs for record in run.records for name in record.metrics)
