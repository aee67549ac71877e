"""Reading finished or unfinished runs, and making them comparable.

Curves are drawn as moving averages over a tenth of the rounds, as in the paper; figures are
computed from the tests themselves, see `statistics`.

Runs of a comparison share their cohorts, and scores jump with the cohort. A mean over all rounds of
one run beside a mean over every other round of another would compare cohorts, not methods, so each
metric is taken at the rounds that all runs have.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from fedproto.config import RunConfig
from fedproto.data import DataSource
from fedproto.data.tasks import headline
from fedproto.errors import ConfigError, StoreError, unknown_name
from fedproto.report.statistics import Rounds, Values, moving_average, score_at, window_width
from fedproto.store import RunStore, read_description
from fedproto.store.sweeps import found_in
from fedproto.strategies.serve import ServeOptions
from fedproto.types import RoundRecord


@dataclass(frozen=True)
class StoredRun:
    """A run as read from its directory."""

    path: Path
    config: RunConfig
    records: list[RoundRecord]

    @property
    def finished(self) -> bool:
        """Whether all planned rounds are on record."""
        return len(self.records) >= self.config.schedule.rounds

    def tested_as(self, options: ServeOptions) -> StoredRun:
        """The run as if it had served one of the models that it tested, to the same bits.

        Raises:
            KeyError: If the model is not among them.
        """
        if options.text not in self._models:
            raise KeyError(options.text)
        config = replace(self.config, serve=options)
        return StoredRun(self.path, config, [one.of_model(options.text) for one in self.records])

    def all_tested(self) -> list[StoredRun]:
        """The run as its served model shows it, then as each model tested beside it does."""
        return [self.tested_as(ServeOptions.parse(text)) for text in self._models]

    @property
    def _models(self) -> list[str]:
        return list(dict.fromkeys((self.config.method.serve.text, *self.config.serve.also)))

    def curve(self, metric: str) -> tuple[Rounds, Values]:
        """Rounds (counted from 1) at which a metric was taken, and its values."""
        points = [
            (record.round + 1, record.metrics[metric])
            for record in self.records
            if metric in record.metrics
        ]
        rounds = np.array([round_ for round_, _ in points], dtype=np.int64)
        return rounds, np.array([value for _, value in points], dtype=np.float64)

    def smoothed(self, metric: str, width: int | None = None) -> tuple[Rounds, Values]:
        """The moving average over `width` rounds or a tenth of the run's, for drawing."""
        rounds, values = self.curve(metric)
        width = width or window_width(self.config.schedule.rounds)
        return rounds, moving_average(rounds, values, width)

    def about_data(self) -> dict[str, Any]:
        """The facts that it keeps about its data; older runs keep fewer."""
        facts: dict[str, Any] = {}
        with suppress(StoreError):  # a run in memory
            facts = read_description(self.path).get("data", {})
        if getattr(self.config.data, "partition", "") == "first":
            facts = {"name": self.config.to_dict()["data"]["name"], "test_overlap": True, **facts}
        return facts

    def fingerprint(self) -> str:
        """Of its data, and of a model without a name; empty where it is not known."""
        parts = ("samples", "partition", *(("module",) if self.config.model is None else ()))
        known: Any = None
        with suppress(StoreError):
            known = read_description(self.path).get("identity")
        known = known if isinstance(known, dict) else {}
        return "".join(str(known.get(part, ""))[:4] for part in parts)

    def final(self, metric: str, until: int | None = None) -> float | None:
        """The mean over the last tenth of the planned rounds up to now, or to round `until`.

        None without a test.
        """
        width = window_width(self.config.schedule.rounds)
        return score_at(*self.curve(metric), width, until)


def find_runs(
    paths: Iterable[Path], on_problem: Callable[[str], None] | None = None
) -> list[StoredRun]:
    """All runs in and below some directories.

    Raises:
        StoreError: If no run can be read, or if one cannot and there is no `on_problem`.
    """
    found: list[StoredRun] = []
    damaged: list[StoreError] = []
    for directory in (one for path in paths for one in found_in(path)):
        try:
            store = RunStore.open(directory, to_compare=True)
            found.append(StoredRun(directory, store.config, store.records()))
        except StoreError as error:
            damaged.append(error)
    if damaged and (on_problem is None or not found):
        raise damaged[0]
    for problem in damaged:
        assert on_problem is not None  # noqa: S101 - raised otherwise
        on_problem(str(problem))
    return found


def main_score(runs: Iterable[StoredRun], asked: str | None = None) -> str:
    """The score by which some runs are compared first: the task's, or the one asked for.

    Runs without scores on test data are compared by those on validation data.

    Raises:
        ConfigError: If runs have scores, but not the one asked for.
    """
    known = {name for run in runs for record in run.records for name in record.metrics}
    if asked is None or not known or asked in known:
        return asked or headline(known)
    if f"validation_{asked}" not in known:
        raise ConfigError(unknown_name("metric", asked, known))
    return f"validation_{asked}"


def comparable(runs: Iterable[StoredRun]) -> list[StoredRun]:
    """All runs in their order; federated ones on the same data at rounds at which all were tested.

    These are the multiples of all their intervals between tests. Centralised training has no
    cohort, and so nothing to share; of data that a program brought it is unknown whether it is the
    same.
    """
    found = list(runs)
    intervals: dict[DataSource, list[int]] = defaultdict(list)
    for run in found:
        if not run.config.strategy.pooled and run.config.data is not None:
            intervals[run.config.data].append(run.config.evaluate.every)
    return [
        run
        if run.config.strategy.pooled or run.config.data is None
        else _tested_every(run, math.lcm(*intervals[run.config.data]))
        for run in found
    ]


def _tested_every(run: StoredRun, interval: int) -> StoredRun:
    """The run without the scores of other rounds; all of it if no other would be left."""
    if run.config.evaluate.every == interval or len(run.records) < interval:
        return run
    records = [
        record if (record.round + 1) % interval == 0 else replace(record, metrics={})
        for record in run.records
    ]
    return replace(run, records=records)
