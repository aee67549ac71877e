"""The parts of the page beside tables and curves: clients, classes, weights, data, analyses.

Results of `fedproto analyse` are read from a run's folder ``analysis`` and checked before they are
shown. A missing file is None; a damaged one is None too, with a sentence that says so.
"""

from __future__ import annotations

import base64
import math
import os
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedproto.config import RunConfig
from fedproto.data.base import DataSource, data_root
from fedproto.data.federation import Federation
from fedproto.data.statistics import class_counts, statistics
from fedproto.disk.files import content, open_plain
from fedproto.disk.integrity import DamagedError, read_json
from fedproto.errors import FedprotoError, StoreError
from fedproto.measures.scores import PER_CLASS, PER_CLIENT, summarize_clients
from fedproto.report.results import StoredRun
from fedproto.report.style import class_colors
from fedproto.rng import Indices
from fedproto.types import RoundRecord

CLASS = "class: "
"""Prefix of the metrics that hold the curves of classes scored in training."""

IOU = "iou_"
EMBEDDED_POINTS = 4000
MOST_PICTURE_BYTES = 12_000_000
MOST_BINS = 10
MOST_COLUMNS = 200
QUANTILES = 101
_MAP_KINDS = ("picture", "truth", "prediction", "softmax-entropy", "feature-entropy")
_COLOR = re.compile(r"#[0-9a-fA-F]{6}")
# All that reading and checking a file of arbitrary content can raise.
_DAMAGES = (
    StoreError,
    DamagedError,
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    ArithmeticError,
)


@dataclass(frozen=True)
class Scores:
    """Scores of one model per client and per class."""

    round: int
    clients: dict[int, float]
    classes: Mapping[str, float | None]


@dataclass(frozen=True)
class Analysis:
    """The results of `fedproto analyse` for one run."""

    scores: Scores | None = None
    calibration: dict[str, Any] | None = None
    embedding: dict[str, Any] | None = None
    maps: list[Path] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class PageRun:
    """A run as the page needs it.

    Attributes:
        run: With records that have no cohorts and weights, so that large sweeps fit into memory.
        shares: Each client's mean weight in multiples of a uniform share.
        scores: Of the newest model whose clients were scored, in training or by an analysis.
    """

    run: StoredRun
    shares: dict[int, float]
    failures: int
    scores: Scores | None
    analysis: Analysis


def page_run(run: StoredRun) -> PageRun:
    """Reduces a run to the parts that the page shows, and reads its analysis."""
    analysis = read_analysis(run.path)
    found = [] if analysis.scores is None else [analysis.scores]
    for record in run.records:
        if PER_CLIENT in record.tables:
            clients = {int(client): value for client, value in record.tables[PER_CLIENT].items()}
            found.append(Scores(record.round + 1, clients, record.tables.get(PER_CLASS, {})))
    return PageRun(
        replace(run, records=[_reduced(record) for record in run.records]),
        mean_shares(run.records),
        sum(len(record.failures) for record in run.records),
        max(found, key=lambda one: one.round, default=None),
        analysis,
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


def read_analysis(run: Path) -> Analysis:
    """Reads the analysis of a run directory, as far as there is one."""
    folder = run / "analysis"
    problems: list[str] = []

    def part(name: str, check: Callable[[dict[str, Any]], Any]) -> Any:
        file = folder / name
        if not file.exists():
            return None
        try:
            return check(read_json(content(file)))
        except _DAMAGES:
            problems.append(f"{file} is damaged; make it again with 'fedproto analyse {run}'")
            return None

    return Analysis(
        scores=part("scores.json", _scores),
        calibration=part("calibration.json", _calibration),
        embedding=part("embedding.json", _embedding),
        maps=sorted((folder / "maps").glob("*.png"), key=_map_order),
        problems=problems,
    )


def _scores(given: dict[str, Any]) -> Scores:
    clients, classes = given["per_client"], given["per_class"]
    measure = "miou" if "miou" in clients else "accuracy"
    per_class = classes["iou" if "iou" in classes else "accuracy"]
    return Scores(
        round=int(given["round"]),
        clients={
            int(client): value
            for client, given in zip(clients["client"], clients[measure], strict=True)
            if (value := _number(given)) is not None
        },
        classes={
            str(name): _number(value)
            for name, value in zip(classes["class"], per_class, strict=True)
        },
    )


def _calibration(given: dict[str, Any]) -> dict[str, Any]:
    bins = [
        {name: _finite(one[name]) for name in ("low", "high", "confidence", "accuracy", "count")}
        for one in given["bins"]
        if one["count"]
    ]
    return {"round": int(given["round"]), "ece": _finite(given["ece"]), "bins": bins}


def _embedding(given: dict[str, Any]) -> dict[str, Any]:
    points = list(zip(given["x"], given["y"], given["class"], strict=True))
    names, colors = [str(name) for name in given["classes"]], [str(c) for c in given["colors"]]
    if not all(_COLOR.fullmatch(color) for color in colors) or len(colors) < len(names):
        raise ValueError("no colour")
    if any(not 0 <= int(label) < len(names) for _, _, label in points):
        raise ValueError("no such class")
    kept = points[:: math.ceil(len(points) / EMBEDDED_POINTS) or 1]
    return {
        "round": int(given["round"]),
        "x": [round(_finite(x), 3) for x, _, _ in kept],
        "y": [round(_finite(y), 3) for _, y, _ in kept],
        "class": [int(label) for _, _, label in kept],
        "classes": names,
        "colors": colors,
        "left_out": len(points) - len(kept),
    }


def _map_order(path: Path) -> tuple[str, int, str]:
    """Maps of one picture together, in the order of their kinds."""
    picture, _, kind = path.stem.partition("-")
    rank = _MAP_KINDS.index(kind) if kind in _MAP_KINDS else len(_MAP_KINDS)
    return picture, rank, kind


def _finite(value: Any) -> float:
    if not math.isfinite(value):
        raise ValueError("not a finite number")
    return float(value)


def _number(value: Any) -> float | None:
    """A finite number; None for a client or class without test samples."""
    return None if value is None or not math.isfinite(value) else float(value)


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


class DataPanels:
    """Loads each data set once and keeps its panel."""

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

    def classes(self, config: RunConfig) -> int:
        """The number of classes of a run's data; 0 if it cannot be loaded."""
        (panel,) = self.of([config])
        return len(panel["classes"])

    def holdings(self, config: RunConfig) -> Holdings | None:
        """The holdings of a run's clients; None if its data cannot be loaded."""
        self.of([config])
        return self._holdings.get(config.data)

    def _panel(self, config: RunConfig) -> dict[str, Any]:
        source, own = config.data, self._own
        options = config.to_dict().get("data", {"name": own.name if own else "own data"})
        panel: dict[str, Any] = {"name": options.pop("name"), "options": options}
        nothing: dict[str, Any] = dict.fromkeys(("statistics", "colors", "grid"))
        nothing["classes"] = []
        try:
            if source is not None:
                own = source.listed(data_root()) or source.load(data_root())
            if own is None:
                return panel | nothing | {"problem": "given in Python, so it cannot be read again"}
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
            "grid": class_grid(counts),
        }


def class_grid(counts: Indices) -> dict[str, Any]:
    """A heat map of ``log10`` of the number of samples per class (row) and client (column).

    Where there are more than `MOST_COLUMNS` clients, a column is the mean of several. The cells are
    bytes, row by row, as base64: 0 for an empty cell, else 1 (``low``) to 255 (``high``).
    """
    span = math.ceil(len(counts) / MOST_COLUMNS)
    starts = np.arange(0, len(counts), span)
    joined = np.diff(np.append(starts, len(counts)))
    means = np.add.reduceat(counts.astype(np.float64), starts, axis=0).T / joined
    held = means > 0
    values = np.log10(means, out=np.zeros_like(means), where=held)
    low = float(values[held].min()) if held.any() else 0.0
    high = max(low + 0.01, float(values[held].max()) if held.any() else 0.0)
    levels = 1 + np.rint(254 * (values - low) / (high - low))
    cells = np.where(held, levels, 0).astype(np.uint8)
    return {
        "rows": values.shape[0],
        "columns": values.shape[1],
        "column_span": span,
        "total_columns": len(counts),
        "low": low,
        "high": high,
        "cells": base64.b64encode(cells.tobytes()).decode(),
    }


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


def fairness(scores: Sequence[Scores], holdings: Holdings | None) -> dict[str, Any] | None:
    """Mean client, worst tenth and share at zero, each the mean over seeds; quantiles of all."""
    values = np.sort([value for one in scores for value in one.clients.values()])
    if not len(values):
        return None
    per_seed = [summarize_clients(list(one.clients.values())) for one in scores if one.clients]
    mean, worst, zero = np.mean(per_seed, axis=0).tolist()
    return {
        "round": max(one.round for one in scores),
        "clients": len(values),
        "seeds": len(scores),
        "mean": mean,
        "zero": zero,
        "worst": worst,
        "quantiles": np.quantile(values, np.linspace(0, 1, QUANTILES)).round(5).tolist(),
        **_by_holdings([one.clients for one in scores], holdings),
    }


def attention(
    shares: Sequence[Mapping[int, float]], holdings: Holdings | None
) -> dict[str, Any] | None:
    """Range of the clients' weights; None where no round had two clients."""
    values = [value for one in shares for value in one.values()]
    if not values:
        return None
    return {"low": min(values), "high": max(values), **_by_holdings(shares, holdings)}


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


def classes(scores: Sequence[Scores], runs: Sequence[StoredRun]) -> dict[str, float] | None:
    """The score per class, the mean over the seeds."""
    tables: list[Mapping[str, float | None]] = [one.classes for one in scores]
    if not any(tables):  # segmentation records IoU per class in every test
        tables = [
            {
                name.removeprefix(IOU): run.final(name)
                for name in dict.fromkeys(n for record in run.records for n in record.metrics)
                if name.startswith(IOU)
            }
            for run in runs
        ]
    means = {
        name: round(float(np.mean(found)), 5)
        for name in dict.fromkeys(name for table in tables for name in table)
        if (found := [value for table in tables if (value := table.get(name)) is not None])
    }
    return means or None


def calibration(found: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """The reliability of all seeds' predictions together."""
    if not found:
        return None
    pooled: dict[float, list[Mapping[str, float]]] = defaultdict(list)
    for one in found:
        for bin_ in one["bins"]:
            pooled[round(bin_["low"], 6)].append(bin_)
    bins = []
    for low in sorted(pooled):
        counts = [bin_["count"] for bin_ in pooled[low]]
        means = {
            name: float(np.average([bin_[name] for bin_ in pooled[low]], weights=counts))
            for name in ("confidence", "accuracy")
        }
        bins.append({"low": low, "high": pooled[low][0]["high"], "count": sum(counts), **means})
    total = sum(bin_["count"] for bin_ in bins)
    error = sum(bin_["count"] * abs(bin_["accuracy"] - bin_["confidence"]) for bin_ in bins)
    return {"ece": error / total if total else 0.0, "bins": bins}
