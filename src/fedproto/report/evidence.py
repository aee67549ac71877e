"""Whether a difference between methods is more than chance: pairs, intervals, tests, verdicts.

Runs of the same seed share initial weights, cohorts, stragglers and batches, so methods are
compared pair by pair. Everything here is for whole degrees of freedom and needs no SciPy; the tests
hold it against SciPy's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np

SURE = 0.95
"""How often an interval should hold the true difference."""

FEWEST_PAIRS = 3
"""With fewer, Student's t asks for differences twelve times their spread: nothing can be said."""

Verdict: TypeAlias = Literal["better", "level", "worse", "too few seeds"]


@dataclass(frozen=True)
class Difference:
    """Paired differences of one method from another.

    Attributes:
        low: Lower end of the interval of the mean by Student's t; None for fewer than two pairs.
        p: Two-sided, of Student's t for pairs; None for fewer than two.
        sign_p: Two-sided, of the sign test over wins and losses; None where there are none.
    """

    pairs: int
    mean: float
    low: float | None
    high: float | None
    p: float | None
    wins: int
    losses: int
    sign_p: float | None

    def verdict(self, *, lower_is_better: bool = False) -> Verdict:
        """What the interval says in a word.

        ``level`` means that the interval holds zero: these pairs show no difference. It does not
        mean that there is none.
        """
        if self.pairs < FEWEST_PAIRS or self.low is None or self.high is None:
            return "too few seeds"
        if self.low <= 0 <= self.high:
            return "level"
        return "better" if (self.mean < 0) == lower_is_better else "worse"


def difference(values: Sequence[float]) -> Difference:
    """What paired differences say."""
    number, mean = len(values), float(np.mean(values))
    wins, losses = sum(value > 0 for value in values), sum(value < 0 for value in values)
    low = high = p = None
    spread = sample_deviation(values)
    if spread is not None:
        error = spread / math.sqrt(number)
        half = t_quantile(number - 1) * error
        low, high = mean - half, mean + half
        p = 1 - t_within(abs(mean) / error, number - 1) if error else float(mean == 0)
    return Difference(number, mean, low, high, p, wins, losses, sign_test(wins, losses))


def sample_deviation(values: Sequence[float]) -> float | None:
    """The standard deviation of what the values are a sample of; None for fewer than two."""
    return float(np.std(values, ddof=1)) if len(values) > 1 else None


def sign_test(wins: int, losses: int) -> float | None:
    """How likely an outcome at least as one-sided is when both are equally likely."""
    number, fewer = wins + losses, min(wins, losses)
    if not number:
        return None
    tail = sum(math.comb(number, count) for count in range(fewer + 1))
    return min(1.0, tail / float(1 << (number - 1)))


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """p-values corrected for how many there are (Holm 1979), in the order given.

    Where one of them falls under 0.05, the chance that any of the differences below it is mere
    chance is at most 0.05, however the comparisons depend on each other.
    """
    known = sorted((p, index) for index, p in enumerate(p_values) if p is not None)
    corrected: list[float | None] = [None] * len(p_values)
    largest = 0.0
    for rank, (p, index) in enumerate(known):
        largest = max(largest, min(1.0, (len(known) - rank) * p))
        corrected[index] = largest
    return corrected


def t_within(t: float, freedom: int) -> float:
    """The chance that Student's t lies between −t and t, for whole degrees of freedom.

    The finite series in the angle whose tangent is ``t / sqrt(freedom)``.
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
    """The t between whose negative and itself Student's t lies with the chance `sure`."""
    low, high = 0.0, 1.0
    while t_within(high, freedom) < sure:
        low, high = high, 2 * high
    while (middle := (low + high) / 2) not in (low, high):
        if t_within(middle, freedom) < sure:
            low = middle
        else:
            high = middle
    return high
