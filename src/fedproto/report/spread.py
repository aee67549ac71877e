"""How the data of some runs is spread over the clients, for the HTML page."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedproto.config import RunConfig
from fedproto.data.base import DATASETS, DataSource, data_root
from fedproto.data.federation import Federation
from fedproto.data.masks import palette
from fedproto.data.statistics import class_counts, statistics
from fedproto.errors import FedprotoError
from fedproto.options import options_to_dict
from fedproto.report.grids import class_grid
from fedproto.rng import Indices

MOST_BINS = 10


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
        panels = []
        for source in dict.fromkeys(config.data for config in configs):
            if source not in self._panels:
                self._panels[source] = self._panel(source)
            panels.append(self._panels[source])
        return panels

    def holdings(self, config: RunConfig) -> Holdings | None:
        """What the clients of a run hold; None where its data cannot be had."""
        self.of([config])
        return self._holdings.get(config.data)

    def _panel(self, source: DataSource | None) -> dict[str, Any]:
        if source is None:
            return self._own_panel()
        name, options = DATASETS.name_of(type(source)), options_to_dict(source)
        try:
            federation = source.listed(data_root()) or source.load(data_root())
            return self._shown(source, federation, name, options)
        except FedprotoError as error:
            return _missing(name, options, str(error))

    def _own_panel(self) -> dict[str, Any]:
        if self._own is None:
            problem = "given in Python, so it cannot be read again"
            return _missing("own data", {}, problem)
        try:
            return self._shown(None, self._own, self._own.name, {})
        except FedprotoError as error:
            return _missing(self._own.name, {}, str(error))

    def _shown(
        self,
        source: DataSource | None,
        federation: Federation,
        name: str,
        options: dict[str, Any],
    ) -> dict[str, Any]:
        counts = class_counts(federation)
        sizes = np.array([len(client.train) for client in federation.clients], dtype=np.int64)
        self._holdings[source] = Holdings(sizes, (counts > 0).sum(axis=1))
        first = int(federation.has_label_maps)
        names = [str(name) for name in federation.class_names[first:]]
        return {
            "name": name,
            "options": options,
            "statistics": asdict(statistics(federation)),
            "classes": names or [str(label) for label in range(counts.shape[1])],
            "colors": [f"#{bytes(color).hex()}" for color in palette()[1 : len(names) + 1]]
            if first
            else None,
            "grid": class_grid(counts).to_dict(),
            "problem": None,
        }


def binned(of: Indices, values: NDArray[np.float64]) -> list[list[float]]:
    """How a quantity of clients goes with what they hold.

    Clients are put together by value, or by tenths where there are many.

    Returns:
        Per bin the mean holding, the quantity's mean and quartiles, and the number of clients.
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


def _missing(name: str, options: dict[str, Any], problem: str) -> dict[str, Any]:
    nothing: dict[str, Any] = {"statistics": None, "classes": [], "colors": None, "grid": None}
    return {"name": name, "options": options, **nothing, "problem": problem}
