"""The parts of the page beside tables and curves: clients, classes, weights, analyses.

Tables of scores come from a run's records or from what `fedproto analyse` wrote to its folder
``analysis``, whichever is newer. A missing file is None; a damaged one is None too, with a sentence
that says so.
"""

from __future__ import annotations

import base64
import os
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from fedproto.analysis.uncertainty import BINS, RELIABILITY
from fedproto.config import RunConfig
from fedproto.data.base import DataSource, data_root
from fedproto.data.federation import Federation
from fedproto.data.statistics import class_counts
from fedproto.disk.files import open_plain
from fedproto.errors import FedprotoError, StoreError
from fedproto.measures.scores import PER_CLASS, PER_CLIENT, summarize_clients
from fedproto.report.analysing import EMBEDDING, finite, read_measured, read_part
from fedproto.report.results import StoredRun
from fedproto.rng import Indices
from fedproto.types import RoundRecord

CLASS = "class: "
"""Prefix of the metrics that hold the curves of classes scored in training."""

IOU = "iou_"
MOST_PICTURE_BYTES = 12_000_000
MOST_BINS = 10
QUANTILES = 101
_MAP_KINDS = ("picture", "truth", "prediction", "softmax-entropy", "feature-entropy")
_COLOR = re.compile(r"#[0-9a-fA-F]{6}")

T = TypeVar("T")


@dataclass(frozen=True)
class PageRun:
    """A run as the page needs it.

    Attributes:
        run: With records that have no cohorts and weights, so that large sweeps fit into memory.
        shares: Each client's mean weight in multiples of a uniform share.
        tables: The newest of each name, and after how many rounds it was taken.
        problems: Damaged files, each in a sentence.
    """

    run: StoredRun
    shares: dict[int, float]
    failures: int
    tables: dict[str, tuple[int, dict[str, float]]]
    embedding: dict[str, Any] | None = None
    maps: list[Path] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def page_run(run: StoredRun) -> PageRun:
    """Reduces a run to the parts that the page shows, and reads its analysis."""
    problems: list[str] = []

    def part(read: Callable[[], T | None]) -> T | None:
        try:
            return read()
        except StoreError as error:
            problems.append(str(error))
            return None

    measured = part(lambda: read_measured(run.path))
    taken = [(record.round + 1, record.tables) for record in run.records]
    if measured is not None:
        taken.append((measured.round, measured.tables))
    taken.sort(key=lambda one: one[0])
    return PageRun(
        replace(run, records=[_reduced(record) for record in run.records]),
        mean_shares(run.records),
        sum(len(record.failures) for record in run.records),
        {name: (round_, table) for round_, tables in taken for name, table in tables.items()},
        part(lambda: read_part(run.path, EMBEDDING, _embedding)),
        sorted((run.path / "analysis" / "maps").glob("*.png"), key=_map_order),
        problems,
    )


def mean_shares(records: Iterable[RoundRecord]) -> dict[int, float]:
    """Each client's mean weight in multiples of a uniform share, over rounds of several clients."""
    total: defaultdict[int, float] = defaultdict(float)
    rounds: Counter[int] = Counter()
    for record in records:
        if len(record.attention) > 1:
            for client, weight in record.attention.items():
                total[client] += weight * len(record.attention)
                rounds[client] += 1
    return {client: weight / rounds[client] for client, weight in total.items()}


def _reduced(record: RoundRecord) -> RoundRecord:
    classes = {f"{CLASS}{name}": value for name, value in record.tables.get(PER_CLASS, {}).items()}
    return replace(
        record,
        metrics={**record.metrics, **classes},
        tables={},
        cohort=[],
        stragglers=[],
        dropped=[],
        epochs={},
        attention={},
        failures={},
    )


def _embedding(given: dict[str, Any]) -> dict[str, Any]:
    points = list(zip(given["x"], given["y"], given["class"], strict=True))
    names, colors = [str(name) for name in given["classes"]], [str(c) for c in given["colors"]]
    if not all(_COLOR.fullmatch(color) for color in colors) or len(colors) < len(names):
        raise ValueError("no colour")
    if any(not (finite(x) and finite(y) and 0 <= label < len(names)) for x, y, label in points):
        raise ValueError("no such point")
    return {
        "round": int(given["round"]),
        "x": [round(float(x), 3) for x, _, _ in points],
        "y": [round(float(y), 3) for _, y, _ in points],
        "class": [int(label) for _, _, label in points],
        "classes": names,
        "colors": colors,
    }


def _map_order(path: Path) -> tuple[str, int, str]:
    """Maps of one picture together, in the order of their kinds."""
    picture, _, kind = path.stem.partition("-")
    rank = _MAP_KINDS.index(kind) if kind in _MAP_KINDS else len(_MAP_KINDS)
    return picture, rank, kind


def embedded_pictures(paths: list[Path]) -> dict[Path, str]:
    """Pictures as data addresses, up to `MOST_PICTURE_BYTES` in all."""
    addresses: dict[Path, str] = {}
    room = MOST_PICTURE_BYTES
    for path in paths:
        try:
            with open_plain(path, os.O_RDONLY) as file:  # no link: it could lead to any file
                picture = file.read(room + 1)
        except OSError:
            continue
        if len(picture) <= room:
            room -= len(picture)
            encoded = base64.b64encode(picture).decode()
            addresses[path] = f"data:image/png;base64,{encoded}"
    return addresses


@dataclass(frozen=True)
class Holdings:
    """Training samples and number of classes of each client, ``[K]`` each."""

    size: Indices
    classes: Indices
    num_classes: int


class ClientData:
    """What the clients of runs hold; each data set is loaded once."""

    def __init__(self, own: Federation | None = None) -> None:
        self._own = own
        self._found: dict[DataSource | None, Holdings | None] = {}

    def of(self, config: RunConfig) -> Holdings | None:
        """The holdings of a run's clients; None if its data cannot be loaded."""
        source, federation = config.data, self._own
        if source not in self._found:
            try:
                if source is not None:
                    federation = source.listed(data_root()) or source.load(data_root())
            except FedprotoError:
                federation = None
            self._found[source] = None if federation is None else _holdings(federation)
        return self._found[source]


def _holdings(federation: Federation) -> Holdings:
    counts = class_counts(federation)
    return Holdings(federation.train_sizes, (counts > 0).sum(axis=1), counts.shape[1])


def binned(of: Indices, values: NDArray[np.float64]) -> list[list[float]]:
    """Means of a client quantity by the number of samples or classes that clients have.

    Returns:
        Per value of `of`, or per tenth of the clients if there are many: its mean there, the mean
        of the quantity, its quartiles, and the number of clients.
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


def fairness(runs: Sequence[PageRun], holdings: Holdings | None) -> dict[str, Any] | None:
    """Mean client, worst tenth and share at zero, each the mean over seeds; quantiles of all."""
    found = [one.tables[PER_CLIENT] for one in runs if PER_CLIENT in one.tables]
    tables = [
        {int(client): value for client, value in table.items() if client.isdecimal()}
        for _, table in found
    ]
    if not any(tables):
        return None
    values = np.sort([value for table in tables for value in table.values()])
    per_seed = [summarize_clients(list(table.values())) for table in tables if table]
    mean, worst, zero = np.mean(per_seed, axis=0).tolist()
    return {
        "round": max(round_ for round_, _ in found),
        "clients": len(values),
        "seeds": len(tables),
        "mean": mean,
        "zero": zero,
        "worst": worst,
        "quantiles": np.quantile(values, np.linspace(0, 1, QUANTILES)).round(5).tolist(),
        **_by_holdings(tables, holdings),
    }


def attention(
    shares: Sequence[Mapping[int, float]], holdings: Holdings | None
) -> dict[str, Any] | None:
    """The clients' weights by samples and classes; None where no round had two clients."""
    return _by_holdings(shares, holdings) if any(shares) else None


def _by_holdings(
    values: Iterable[Mapping[int, float]], holdings: Holdings | None
) -> dict[str, list[list[float]]]:
    """A client quantity, mean over seeds, by the clients' samples and by their classes."""
    if holdings is None:
        return {"size": [], "classes": []}
    seeds = list(values)
    means = np.full(len(holdings.size), np.nan)
    for client in range(len(means)):
        found = [one[client] for one in seeds if client in one]
        if found:
            means[client] = np.mean(found)
    return {"size": binned(holdings.size, means), "classes": binned(holdings.classes, means)}


def classes(runs: Sequence[PageRun]) -> dict[str, float] | None:
    """The score per class, the mean over the seeds."""
    tables = [one.tables[PER_CLASS][1] for one in runs if PER_CLASS in one.tables]
    if not any(tables):  # segmentation records IoU per class in every test
        tables = [
            {
                name.removeprefix(IOU): value
                for name in dict.fromkeys(n for record in one.run.records for n in record.metrics)
                if name.startswith(IOU) and (value := one.run.final(name)) is not None
            }
            for one in runs
        ]
    means = {
        name: round(float(np.mean([table[name] for table in tables if name in table])), 5)
        for name in dict.fromkeys(name for table in tables for name in table)
    }
    return means or None


def calibration(runs: Sequence[PageRun]) -> dict[str, Any] | None:
    """The reliability diagram of all seeds' predictions together."""
    diagrams = [
        [one.tables[name][1] for name in RELIABILITY]
        for one in runs
        if all(name in one.tables for name in RELIABILITY)
    ]
    bins = []
    for high in (f"{number / BINS:.4g}" for number in range(1, BINS + 1)):
        parts = [[table.get(high, 0.0) for table in diagram] for diagram in diagrams]
        count = sum(part[0] for part in parts)
        if count > 0:
            accuracy, confidence = (sum(p[0] * p[at] for p in parts) / count for at in (1, 2))
            ends = {"low": float(high) - 1 / BINS, "high": float(high)}
            bins.append({**ends, "count": count, "accuracy": accuracy, "confidence": confidence})
    total = sum(one["count"] for one in bins)
    error = sum(one["count"] * abs(one["accuracy"] - one["confidence"]) for one in bins)
    return {"ece": error / total, "bins": bins} if bins else None
