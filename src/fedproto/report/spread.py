"""How the data of some runs is spread over the clients, for the HTML page."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedproto.config import RunConfig
from fedproto.data.base import DATASETS, DataSource, data_root
from fedproto.data.statistics import class_counts, statistics
from fedproto.errors import FedprotoError
from fedproto.options import options_to_dict
from fedproto.report.grids import class_grid
from fedproto.rng import Indices

MOST_BINS = 10


@dataclass(frozen=True)
class Holdings:
    """What each client holds.

    Attributes:
        size: Training samples, ``[K]``.
        classes: Classes among its samples, ``[K]``.
    """

    size: Indices
    classes: Indices


class DataPanels:
    """Loads each data set once and remembers its panel."""

    def __init__(self) -> None:
        self._panels: dict[DataSource, dict[str, Any]] = {}
        self._holdings: dict[DataSource, Holdings] = {}

    def of(self, configs: Iterable[RunConfig]) -> list[dict[str, Any]]:
        """One panel per data set that the runs use, in the order of the runs."""
        sources = dict.fromkeys(config.data for config in configs)
        panels = []
        for source in sources:
            if source is None:
                problem = "given in Python, so it cannot be read again"
                panels.append(_missing("own data", {}, problem))
                continue
            if source not in self._panels:
                self._panels[source] = self._panel(source)
            panels.append(self._panels[source])
        return panels

    def holdings(self, config: RunConfig) -> Holdings | None:
        """What the clients of a run hold; None where its data cannot be had."""
        self.of([config])
        return None if config.data is None else self._holdings.get(config.data)

    def _panel(self, source: DataSource) -> dict[str, Any]:
        name, options = DATASETS.name_of(type(source)), options_to_dict(source)
        try:
            federation = source.listed(data_root()) or source.load(data_root())
            counts = class_counts(federation)
        except FedprotoError as error:
            return _missing(name, options, str(error))
        sizes = np.array([len(client.train) for client in federation.clients], dtype=np.int64)
        self._holdings[source] = Holdings(sizes, (counts > 0).sum(axis=1))
        first = int(federation.task == "segmentation")
        names = [str(name) for name in federation.class_names[first:]]
        return {
            "name": name,
            "options": options,
            "statistics": asdict(statistics(federation)),
            "classes": names or [str(place) for place in range(counts.shape[1])],
            "grid": class_grid(counts).to_dict(),
            "problem": None,
        }


def binned(of: Indices, values: NDArray[np.float64]) -> list[list[float]]:
    """How a quantity of clients goes with what they hold.

    Clients are put together by value, or by tenths where there are many.

    Args:
        of: What they hold, ``[K]``.
        values: The quantity, ``[K]``; NaN where a client has none.

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
    for place in np.unique(bins):
        inside = values[bins == place]
        low, high = np.quantile(inside, (0.25, 0.75))
        facts = (of[bins == place].mean(), inside.mean(), low, high, len(inside))
        result.append([float(f"{fact:.5g}") for fact in facts])
    return result


def _missing(name: str, options: dict[str, Any], problem: str) -> dict[str, Any]:
    nothing: dict[str, Any] = {"statistics": None, "classes": [], "grid": None}
    return {"name": name, "options": options, **nothing, "problem": problem}
