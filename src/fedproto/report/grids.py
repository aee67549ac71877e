"""Heat maps small enough for a page: values over clients and rounds, or classes, one byte a cell.

A thousand clients over thousands of rounds have more cells than a screen has pixels, so neighbours
are averaged when the page is written. An empty cell is 0; the others are 1 to 255, from the lowest
to the highest value of the scale.
"""

from __future__ import annotations

import base64
import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedproto.rng import Indices
from fedproto.types import RoundRecord

MOST_ROWS = 100
MOST_COLUMNS = 200
# A weight of a 64th of the uniform share, or none at all, is the end of the scale.
_FURTHEST = 6.0
_ALIKE = 1e-6


@dataclass(frozen=True)
class Grid:
    """A heat map.

    Attributes:
        row_span: How many neighbours a row stands for.
        cells: Places on the scale row by row, as base64: 0 for an empty cell, else 1 to 255.
    """

    rows: int
    columns: int
    row_span: int
    column_span: int
    total_rows: int
    total_columns: int
    low: float
    high: float
    cells: str


class AttentionMap:
    """How much clients counted over the rounds, relative to counting alike; grows with the run.

    A cell holds the mean of ``log2(weight · K)`` over the rounds it stands for in which the client
    was one of the K whose updates were averaged: 0 is the uniform share, 1 twice as much.
    """

    def __init__(self, rounds: int) -> None:
        self._span = math.ceil(rounds / MOST_COLUMNS)
        self._rounds = 0
        self._sum = np.zeros((0, math.ceil(rounds / self._span)))
        self._count = np.zeros_like(self._sum)
        self._shares = np.zeros(0)

    def add(self, record: RoundRecord) -> None:
        """Takes in one more round; one of a single client says nothing and is left out."""
        self._rounds = max(self._rounds, record.round + 1)
        weights = record.attention
        column = record.round // self._span
        if len(weights) < 2 or column >= self._sum.shape[1]:
            return
        clients = np.fromiter(weights, dtype=np.int64)
        share = np.fromiter(weights.values(), dtype=np.float64) * len(weights)
        missing = int(clients.max()) + 1 - len(self._sum)
        if missing > 0:
            self._sum = np.pad(self._sum, ((0, missing), (0, 0)))
            self._count = np.pad(self._count, ((0, missing), (0, 0)))
            self._shares = np.pad(self._shares, (0, missing))
        self._sum[clients, column] += np.log2(np.maximum(share, 2.0**-_FURTHEST))
        self._count[clients, column] += 1
        self._shares[clients] += share

    @property
    def clients(self) -> int:
        """One more than the largest client that ever took part."""
        return len(self._sum)

    @property
    def shares(self) -> NDArray[np.float64]:
        """Each client's mean weight in multiples of a uniform share; NaN if it never took part."""
        rounds = self._count.sum(axis=1)
        means: NDArray[np.float64] = np.full(len(rounds), np.nan)
        means[rounds > 0] = self._shares[rounds > 0] / rounds[rounds > 0]
        return means

    def grid(self, order: Indices | None = None) -> Grid | None:
        """The heat map so far, rows are clients; None where all clients always counted alike."""
        furthest = float(np.abs(self._sum).max(initial=0.0))
        if furthest < _ALIKE:
            return None
        columns = math.ceil(self._rounds / self._span)
        order = np.arange(self.clients) if order is None else order
        span = math.ceil(len(order) / MOST_ROWS)
        sums = _join_rows(self._sum[order, :columns], span)
        counts = _join_rows(self._count[order, :columns], span)
        means = np.divide(sums, counts, out=np.zeros_like(sums), where=counts > 0)
        furthest = max(0.01, float(np.abs(means).max()))
        return Grid(
            rows=means.shape[0],
            columns=means.shape[1],
            row_span=span,
            column_span=self._span,
            total_rows=len(order),
            total_columns=self._rounds,
            low=-furthest,
            high=furthest,
            cells=_packed(0.5 + means / (2 * furthest), counts > 0),
        )


def class_grid(counts: Indices) -> Grid:
    """How many samples of each class the clients have, rows are classes.

    A cell holds ``log10`` of the number of samples, of their mean where clients are joined.
    """
    span = math.ceil(len(counts) / MOST_COLUMNS)
    present = _join_rows(np.ones((len(counts), 1)), span)
    means = (_join_rows(counts.astype(np.float64), span) / present).T
    held = means > 0
    values = np.log10(means, out=np.zeros_like(means), where=held)
    low = float(values[held].min()) if held.any() else 0.0
    high = max(low + 0.01, float(values[held].max()) if held.any() else 0.0)
    return Grid(
        rows=values.shape[0],
        columns=values.shape[1],
        row_span=1,
        column_span=span,
        total_rows=counts.shape[1],
        total_columns=len(counts),
        low=low,
        high=high,
        cells=_packed((values - low) / (high - low), held),
    )


def _join_rows(values: NDArray[np.float64], span: int) -> NDArray[np.float64]:
    return np.add.reduceat(values, np.arange(0, len(values), span), axis=0)


def _packed(shares: NDArray[np.float64], present: NDArray[np.bool_]) -> str:
    """Places on the scale, from 0 to 1, as bytes."""
    cells = np.where(present, 1 + np.rint(shares * 254), 0).astype(np.uint8)
    return base64.b64encode(cells.tobytes()).decode()
