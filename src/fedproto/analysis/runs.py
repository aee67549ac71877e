"""What records of rounds say beyond scores: attention over clients and rounds, correlations."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedproto.errors import ConfigError, install
from fedproto.types import POOLED, RoundRecord


def attention_matrix(records: Sequence[RoundRecord], num_clients: int = 0) -> NDArray[np.float64]:
    """The clients' weights in the average, ``[K, T]``; NaN where a client took no part."""
    asked = [client for record in records for client in (*record.cohort, *record.attention)]
    rows = max([num_clients - 1, *asked], default=-1) + 1
    matrix = np.full((rows, len(records)), math.nan)
    for column, record in enumerate(records):
        for client, weight in record.attention.items():
            if client != POOLED:
                matrix[client, column] = weight
    return matrix


@dataclass(frozen=True)
class AttentionSpread:
    """How far from equal the weights are, relative to equal ones in each round."""

    lowest: float
    highest: float
    deviation: float


def attention_spread(records: Sequence[RoundRecord]) -> AttentionSpread | None:
    """Over all rounds in which several clients took part; None where there is no such round."""
    relative = [
        weight * len(record.attention)
        for record in records
        if len(record.attention) > 1
        for weight in record.attention.values()
    ]
    if not relative:
        return None
    return AttentionSpread(min(relative), max(relative), float(np.std(relative)))


@dataclass(frozen=True)
class Correlation:
    """Pearson's correlation, and the chance of at least such a one by accident."""

    rho: float
    p_value: float
    number: int


def pearson(x: Sequence[float], y: Sequence[float]) -> Correlation:
    """Pearson's ρ with its two-sided p-value, from Student's t with n − 2 degrees of freedom."""
    if len(x) != len(y) or len(x) < 3:
        raise ConfigError(f"a correlation needs at least three points, not {min(len(x), len(y))}")
    if len(set(x)) < 2 or len(set(y)) < 2:
        raise ConfigError("a correlation needs quantities that change; one of them is constant")
    if importlib.util.find_spec("scipy") is None:
        raise ConfigError(f"correlations need SciPy: {install('analysis')}")
    from scipy.stats import pearsonr

    found = pearsonr(x, y)
    return Correlation(float(found.statistic), float(found.pvalue), len(x))
