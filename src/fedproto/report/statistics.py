"""Statistics of scores over rounds and seeds: the only place where they are computed.

A run's score is the mean of its tests over the last tenth of its rounds; its mean over rounds is
the plain mean of all its tests. Runs of the same seed share initial weights, cohorts, stragglers
and batches, so methods are compared seed by seed with Student's t for pairs. Only seeds are
repetitions; conditions of one seed are not.

SciPy is not required (CONTRIBUTING.md says why); the tests compare with it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

SURE = 0.95
"""Confidence level of the intervals; 1 − SURE is the level of the tests."""

FEWEST_PAIRS = 3
"""With fewer seeds a difference is always unclear: t would have to exceed 12.7."""

MARGIN = 0.01
"""Scores between 0 and 1 that differ by less than one point are equivalent."""

WINDOW = 0.1
"""Share of the rounds that the score at the end of a run is the mean of."""

Word: TypeAlias = Literal["better", "worse", "equivalent", "unclear"]
Rounds: TypeAlias = NDArray[np.int64]
Values: TypeAlias = NDArray[np.float64]


def window_width(rounds: int, share: float = WINDOW) -> int:
    """Number of rounds in a share of them, at least one; halves are rounded up."""
    return max(1, math.floor(share * rounds + 0.5))


def moving_average(rounds: Rounds, values: Values, width: int) -> Values:
    """The mean of the tests in the last `width` rounds at each test: for drawing only.

    The first values are means of fewer tests, so early tests count several times: do not average a
    moving average.
    """
    starts = np.searchsorted(rounds, rounds - width, side="right")
    means = [values[start : end + 1].mean() for end, start in enumerate(starts)]
    return np.array(means, dtype=np.float64)


def score_at(rounds: Rounds, values: Values, width: int, until: int | None = None) -> float | None:
    """The mean of the tests in the last `width` rounds up to the last test or round `until`."""
    if until is not None:
        kept = rounds <= until
        rounds, values = rounds[kept], values[kept]
    return float(values[rounds > rounds[-1] - width].mean()) if len(rounds) else None


def rounds_to_target(rounds: Rounds, values: Values, target: float, *, lower: bool) -> int | None:
    """The first round whose test reaches a target; None if none does."""
    reached = rounds[values <= target if lower else values >= target]
    return int(reached[0]) if len(reached) else None


@dataclass(frozen=True)
class Difference:
    """Paired differences between two methods.

    Attributes:
        pairs: Number of seeds.
        low: Lower end of the 95 % interval of the mean by Student's t; None for one pair.
        p: Two-sided p-value of Student's t for pairs, not corrected; None for one pair.
    """

    pairs: int
    mean: float
    low: float | None
    high: float | None
    p: float | None
    wins: int
    losses: int

    @property
    def tested(self) -> bool:
        """Whether there are enough pairs for a test."""
        return self.pairs >= FEWEST_PAIRS


class Verdict(NamedTuple):
    """A difference, its p-value corrected for the number of tests, that number, and the word."""

    difference: Difference
    p: float | None
    comparisons: int
    word: Word


def difference(values: Sequence[float]) -> Difference:
    """Mean, interval and tests of one difference per seed."""
    number, mean = len(values), float(np.mean(values))
    wins, losses = sum(value > 0 for value in values), sum(value < 0 for value in values)
    low = high = p = None
    spread = sample_deviation(values)
    if spread is not None:
        error = spread / math.sqrt(number)
        half = t_quantile(number - 1) * error
        low, high = mean - half, mean + half
        p = 1 - t_within(abs(mean) / error, number - 1) if error else float(mean == 0)
    return Difference(number, mean, low, high, p, wins, losses)


def judge(
    found: Sequence[Difference | None], *, lower: bool = False, margin: float | None = None
) -> list[Verdict | None]:
    """A word for each of the differences that are shown together.

    *better* or *worse*: the p-value, corrected for all tests here, is below 0.05. Otherwise
    *equivalent*: the 95 % interval lies within ± `margin`; and otherwise *unclear*.
    """
    corrected = holm([None if one is None or not one.tested else one.p for one in found])
    tests = sum(p is not None for p in corrected)
    verdicts: list[Verdict | None] = []
    for one, p in zip(found, corrected, strict=True):
        if one is None:
            verdicts.append(None)
            continue
        word: Word = "unclear"
        if p is not None and one.low is not None and one.high is not None:
            if p < 1 - SURE:
                word = "better" if (one.mean < 0) == lower else "worse"
            elif margin is not None and max(-one.low, one.high) <= margin:
                word = "equivalent"
        verdicts.append(Verdict(one, p, tests, word))
    return verdicts


def sample_deviation(values: Sequence[float]) -> float | None:
    """The sample standard deviation (n − 1); None for fewer than two values."""
    return float(np.std(values, ddof=1)) if len(values) > 1 else None


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """p-values corrected for their number (Holm 1979), in the order given; None stays None.

    The chance of any false positive among those below 0.05 is at most 0.05, however the tests
    depend on each other.
    """
    known = sorted((p, index) for index, p in enumerate(p_values) if p is not None)
    corrected: list[float | None] = [None] * len(p_values)
    largest = 0.0
    for rank, (p, index) in enumerate(known):
        largest = max(largest, min(1.0, (len(known) - rank) * p))
        corrected[index] = largest
    return corrected


def t_within(t: float, freedom: int) -> float:
    """The probability that Student's t lies between −t and t.

    The finite series in the angle whose tangent is ``t / sqrt(freedom)``, for integer degrees of
    freedom.
    """
    angle = math.atan2(t, math.sqrt(freedom))
    sine, squared = math.sin(angle), math.cos(angle) ** 2
    odd = freedom % 2
    term = math.cos(angle) if odd else 1.0
    total = 0.0
    for step in range(freedom // 2):
        total += term
        upper = 2 * step + (2 if odd else 1)
        term *= squared * upper / (upper + 1)
    inside = 2 / math.pi * (angle + sine * total) if odd else sine * total
    return min(1.0, inside)


def t_quantile(freedom: int, sure: float = SURE) -> float:
    """The t for which Student's t lies between −t and t with probability `sure`."""
    low, high = 0.0, 1.0
    while t_within(high, freedom) < sure:
        low, high = high, 2 * high
    while (middle := (low + high) / 2) not in (low, high):
        if t_within(middle, freedom) < sure:
            low = middle
        else:
            high = middle
    return high
