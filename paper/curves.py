"""Curves over nominal rounds, and means and spreads over δ and seeds.

The paper runs 10 % more rounds than it shows and smooths over 10 % of them. Taken here: of 220
rounds 200 are nominal, and the value at nominal round t is the mean over rounds t + 1 to t + 20. So
every nominal round has a whole window, and the last one is the mean over the rounds on top.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from fedproto.measures.features import PER_CHANNEL
from fedproto.measures.scores import TRAINING_LOSS
from fedproto.report.panels import read_measured
from fedproto.report.results import StoredRun
from fedproto.report.statistics import sample_deviation, score_at
from paper.base import FoundRun

EXTRA = 0.1
"""What is run on top of the nominal rounds, as a share of them."""

SELDOM = frozenset((TRAINING_LOSS, "dissimilarity", "mmd", "aggregate_mean_margin", PER_CHANNEL))
"""Measures of single models, taken every 10 to 44 rounds."""

SELDOM_SHARE = 1 / 3
"""Share of the rounds at the end that they are averaged over: one model's loss swings widely."""


@dataclass(frozen=True)
class Averaged:
    """A figure over several runs.

    Attributes:
        over_deltas: Sample standard deviation over δ of the means over seeds, which is what the
            paper's ± is; None for a single δ.
        over_seeds: Sample standard deviation over seeds, root mean square over δ; None for a single
            seed.
    """

    mean: float
    over_deltas: float | None
    over_seeds: float | None
    runs: int

    def scaled(self, factor: float) -> Averaged:
        """The same in another unit."""
        return Averaged(
            self.mean * factor,
            None if self.over_deltas is None else self.over_deltas * factor,
            None if self.over_seeds is None else self.over_seeds * factor,
            self.runs,
        )


def nominal_rounds(rounds: int) -> int:
    """The rounds that count, of those that were run."""
    return round(rounds / (1 + EXTRA))


def nominal_curve(run: StoredRun, metric: str) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """A metric over nominal rounds, smoothed over the rounds on top."""
    rounds = run.config.schedule.rounds
    on_top = rounds - nominal_rounds(rounds)
    ends, values = run.smoothed(metric, max(1, on_top))
    whole = ends > on_top
    return ends[whole] - on_top, values[whole]


def final_value(run: StoredRun, metric: str) -> float | None:
    """A metric at the last nominal round, the mean over the rounds on top; None if never taken.

    Measures of single models are averaged over the last third of the rounds. What was not measured
    during training is taken from the run's analysis, if that is of the final model. The margin that
    FedProto records by itself is of its cohort's prototypes and cannot be compared with that of
    other methods, which is measured over all clients.
    """
    rounds = run.config.schedule.rounds
    width = rounds * SELDOM_SHARE if metric in SELDOM else rounds - nominal_rounds(rounds)
    value = score_at(*run.curve(metric), max(1, round(width)), until=rounds)
    of_cohort = metric == "aggregate_mean_margin" and not run.config.measure.takes("margin")
    if value is not None and not of_cohort:
        return value
    measured = read_measured(run.path)
    final = measured is not None and measured.round == len(run.records)
    return measured.metrics.get(metric) if measured is not None and final else None


def spread(results: Iterable[FoundRun], metric: str, factor: float = 1.0) -> Averaged | None:
    """The final value over δ and seeds, times a factor; None where no run has it."""
    by_delta: dict[float, list[float]] = defaultdict(list)
    for result in results:
        value = final_value(result.run, metric)
        if value is not None:
            by_delta[result.delta].append(value)
    found = spread_of(list(by_delta.values()))
    return found and found.scaled(factor)


def spread_of(groups: Sequence[Sequence[float]]) -> Averaged | None:
    """Mean and spreads of values, one group of seeds per δ."""
    if not groups:
        return None
    means = [float(np.mean(values)) for values in groups]
    variances = [float(np.var(values, ddof=1)) for values in groups if len(values) > 1]
    return Averaged(
        mean=float(np.mean(means)),
        over_deltas=sample_deviation(means),
        over_seeds=float(np.sqrt(np.mean(variances))) if variances else None,
        runs=sum(len(values) for values in groups),
    )


def band(results: Sequence[FoundRun], metric: str, factor: float = 1.0) -> pd.DataFrame | None:
    """A metric's curve over δ and seeds, at rounds that all runs have; None where there is none.

    Mean and population standard deviation over runs at every round, times a factor.
    """
    curves = [nominal_curve(result.run, metric) for result in results]
    series = [pd.Series(values, rounds) for rounds, values in curves if len(rounds)]
    shared = pd.concat(series, axis=1, join="inner") if series else pd.DataFrame()
    if shared.empty:
        return None
    # One run a row in memory, so that runs are added up one after another whatever their number.
    values = np.ascontiguousarray(shared.to_numpy().T)
    mean, std = factor * values.mean(axis=0), factor * values.std(axis=0)
    return pd.DataFrame({"round": shared.index, "mean": mean, "std": std, "runs": len(series)})
