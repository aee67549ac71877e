"""What clients hold and how much they count, for the HTML page."""

from __future__ import annotations

import base64
import math
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedproto.config import RunConfig
from fedproto.data.base import DataSource, data_root
from fedproto.data.federation import Federation
from fedproto.data.statistics import class_counts, statistics
from fedproto.errors import FedprotoError
from fedproto.report.looks import class_colors
from fedproto.rng import Indices
from fedproto.types import RoundRecord

MOST_BINS = 10
MOST_COLUMNS = 200


@dataclass(frozen=True)
class Holdings:
    """What each client holds: training samples and classes among its samples, ``[K]`` each."""

    size: Indices
    classes: Indices


class DataPanels:
    """Loads each data set once and remembers its panel."""

    def __init__(self, own: Federation | None = None) -> None:
        self._own = own
        self._panels: dict[DataSource | None, dict[str, Any]] = {}
        self._holdings: dict[DataSource | None, Holdings] = {}

    def of(self, configs: Iterable[RunConfig]) -> list[dict[str, Any]]:
        """One panel per data set that the runs use, in the order of the runs."""
        by_source = {config.data: config for config in configs}
        for source, config in by_source.items():
            if source not in self._panels:
                self._panels[source] = self._panel(config)
        return [self._panels[source] for source in by_source]

    def holdings(self, config: RunConfig) -> Holdings | None:
        """What the clients of a run hold; None where its data cannot be had."""
        self.of([config])
        return self._holdings.get(config.data)

    def _panel(self, config: RunConfig) -> dict[str, Any]:
        source, own = config.data, self._own
        options = config.to_dict().get("data", {"name": own.name if own else "own data"})
        panel: dict[str, Any] = {"name": options.pop("name"), "options": options}
        nothing: dict[str, Any] = dict.fromkeys(("statistics", "colors", "grid"))
        nothing["classes"] = []
        if source is None and own is None:
            return panel | nothing | {"problem": "given in Python, so it cannot be read again"}
        try:
            if source is not None:
                own = source.listed(data_root()) or source.load(data_root())
            assert own is not None  # noqa: S101 - one of the two is there
            return panel | self._shown(source, own) | {"problem": None}
        except FedprotoError as error:
            return panel | nothing | {"problem": str(error)}

    def _shown(self, source: DataSource | None, federation: Federation) -> dict[str, Any]:
        counts = class_counts(federation)
        sizes = np.array([len(client.train) for client in federation.clients], dtype=np.int64)
        self._holdings[source] = Holdings(sizes, (counts > 0).sum(axis=1))
        first = int(federation.has_label_maps)
        names = [str(name) for name in federation.class_names[first:]]
        return {
            "statistics": asdict(statistics(federation)),
            "classes": names or [str(label) for label in range(counts.shape[1])],
            "colors": class_colors(len(names) + 1, label_maps=True)[1:] if first else None,
            "grid": asdict(class_grid(counts)),
        }


def binned(of: Indices, values: NDArray[np.float64]) -> list[list[float]]:
    """How a quantity of clients goes with what they hold.

    Clients are put together by value, or by tenths where there are many.
    """
    known = ~np.isnan(values)
    of, values = of[known], values[known]
    if not len(of):
        return []
    levels = np.unique(of)
    if len(levels) > MOST_BINS:
        levels = np.unique(np.quantile(of, np.linspace(0, 1, MOST_BINS + 1)[:-1]))
    bins = np.searchsorted(levels, of, side="right")
    result = []
    for bin_ in np.unique(bins):
        inside = values[bins == bin_]
        low, high = np.quantile(inside, (0.25, 0.75))
        facts = (of[bins == bin_].mean(), inside.mean(), low, high, len(inside))
        result.append([float(f"{fact:.5g}") for fact in facts])
    return result


@dataclass(frozen=True)
class Grid:
    """A heat map small enough for a page, one byte a cell; neighbouring columns are averaged.

    Attributes:
        cells: Places on the scale row by row, as base64: 0 for an empty cell, else 1 to 255.
    """

    rows: int
    columns: int
    column_span: int
    total_rows: int
    total_columns: int
    low: float
    high: float
    cells: str


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
    places = 1 + np.rint(254 * (values - low) / (high - low))
    cells = np.where(held, places, 0).astype(np.uint8)
    return Grid(
        rows=values.shape[0],
        columns=values.shape[1],
        column_span=span,
        total_rows=counts.shape[1],
        total_columns=len(counts),
        low=low,
        high=high,
        cells=base64.b64encode(cells.tobytes()).decode(),
    )


def _join_rows(values: NDArray[np.float64], span: int) -> NDArray[np.float64]:
    return np.add.reduceat(values, np.arange(0, len(values), span), axis=0)


class AttentionShares:
    """Each client's mean weight in multiples of a uniform share; grows with the run."""

    def __init__(self) -> None:
        self._sum: defaultdict[int, float] = defaultdict(float)
        self._rounds: Counter[int] = Counter()

    def add(self, record: RoundRecord) -> None:
        """Takes in one more round; one of a single client says nothing and is left out."""
        weights = record.attention
        if len(weights) > 1:
            for client, weight in weights.items():
                self._sum[client] += weight * len(weights)
                self._rounds[client] += 1

    def means(self) -> dict[int, float]:
        """By client that took part: 1 is the uniform share, 2 twice as much."""
        return {client: total / self._rounds[client] for client, total in self._sum.items()}
