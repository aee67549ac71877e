"""How the data of some runs is spread over the clients, for the HTML page."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedproto.config import RunConfig
from fedproto.data.base import DATASETS, DataSource, data_root
from fedproto.data.federation import Federation
from fedproto.data.statistics import class_counts, statistics
from fedproto.errors import DataError, FedprotoError
from fedproto.options import options_to_dict
from fedproto.report.grids import class_grid


class DataPanels:
    """Loads each data set once and remembers its panel."""

    def __init__(self) -> None:
        self._panels: dict[DataSource, dict[str, Any]] = {}

    def of(self, configs: Iterable[RunConfig]) -> list[dict[str, Any]]:
        """One panel per data set that the runs use, in the order of the runs."""
        sources = dict.fromkeys(config.data for config in configs)
        panels = []
        for source in sources:
            if source is None:
                panels.append(_missing("own data", "given in Python, so it cannot be read again"))
                continue
            if source not in self._panels:
                self._panels[source] = _panel(source)
            panels.append(self._panels[source])
        return panels


def _panel(source: DataSource) -> dict[str, Any]:
    options = ", ".join(f"{key} = {value}" for key, value in options_to_dict(source).items())
    title = f"{DATASETS.name_of(type(source))} ({options})"
    try:
        federation = source.listed(data_root()) or source.load(data_root())
        counts = class_counts(federation)
    except FedprotoError as error:
        return _missing(title, str(error))
    return _shown(title, federation, counts)


def panel_of(federation: Federation) -> dict[str, Any]:
    """The panel of data that is at hand."""
    try:
        return _shown(federation.name, federation, class_counts(federation))
    except DataError as error:
        return _missing(federation.name, str(error))


def _shown(title: str, federation: Federation, counts: NDArray[np.int64]) -> dict[str, Any]:
    first = int(federation.task == "segmentation")
    names = [str(name) for name in federation.class_names[first:]]
    return {
        "title": title,
        "statistics": asdict(statistics(federation)),
        "classes": names or [str(place) for place in range(counts.shape[1])],
        "grid": class_grid(counts).to_dict(),
        "problem": None,
    }


def _missing(title: str, problem: str) -> dict[str, Any]:
    return {"title": title, "statistics": None, "classes": [], "grid": None, "problem": problem}
