"""What the page says of a group beyond scores: fairness, classes, calibration, attention."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedproto.report.analysed import Scores
from fedproto.report.grids import AttentionMap
from fedproto.report.results import StoredRun
from fedproto.report.spread import Holdings, binned

QUANTILES = 101
_IOU = "iou_"


def fairness(scores: Sequence[Scores], holdings: Holdings | None) -> dict[str, Any] | None:
    """The scores of the clients of all seeds together, and how they go with what clients hold."""
    values = np.sort([value for one in scores for value in one.clients.values()])
    if not len(values):
        return None
    tenth = values[: max(1, -(-len(values) // 10))]
    return {
        "measure": scores[0].measure,
        "round": max(one.round for one in scores),
        "clients": len(values),
        "seeds": len(scores),
        "mean": float(values.mean()),
        "std": float(values.std()),
        "zero": float((values == 0).mean()),
        "worst": float(tenth.mean()),
        "quantiles": np.quantile(values, np.linspace(0, 1, QUANTILES)).round(5).tolist(),
        **held([one.clients for one in scores], holdings),
    }


def held(values: Iterable[Mapping[int, float]], holdings: Holdings | None) -> dict[str, Any]:
    """A quantity of clients by the samples and by the classes they hold, seeds pooled."""
    if holdings is None:
        return {"size": [], "classes": []}
    found: dict[int, list[float]] = defaultdict(list)
    for one in values:
        for client, value in one.items():
            found[client].append(value)
    means = np.full(len(holdings.size), np.nan)
    for client, each in found.items():
        if client < len(means):
            means[client] = np.mean(each)
    return {"size": binned(holdings.size, means), "classes": binned(holdings.classes, means)}


def attention(maps: Sequence[AttentionMap], holdings: Holdings | None) -> dict[str, Any] | None:
    """How far a method is from weighing clients alike; None where no round had two clients."""
    seen = [map_ for map_ in maps if np.isfinite(map_.shares).any()]
    if not seen:
        return None
    shares: list[NDArray[np.float64]] = [map_.shares for map_ in seen]
    known = [
        {int(client): float(each[client]) for client in np.flatnonzero(np.isfinite(each))}
        for each in shares
    ]
    values = [value for one in known for value in one.values()]
    first = seen[0]
    orders: dict[str, Any] = {"client": first.grid()}
    if holdings is not None and orders["client"] is not None:
        for name, holding in (("size", holdings.size), ("classes", holdings.classes)):
            order = np.argsort(-holding, kind="stable")
            orders[name] = first.grid(order[order < first.clients])
    return {
        "low": min(values),
        "high": max(values),
        **held(known, holdings),
        "maps": {name: asdict(grid) for name, grid in orders.items() if grid is not None},
    }


def classes(scores: Sequence[Scores], runs: Sequence[StoredRun]) -> dict[str, Any] | None:
    """The score per class, the mean over the seeds."""
    tables: list[Mapping[str, float | None]] = [one.classes for one in scores]
    if not any(tables):  # segmentation records IoU per class as it goes
        tables = [
            {
                name.removeprefix(_IOU): run.final(name)
                for name in dict.fromkeys(n for record in run.records for n in record.metrics)
                if name.startswith(_IOU)
            }
            for run in runs
        ]
    names = list(dict.fromkeys(name for table in tables for name in table))
    means = {
        name: round(float(np.mean(found)), 5)
        for name in names
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
        bins.append(
            {
                "low": low,
                "high": pooled[low][0]["high"],
                "count": sum(counts),
                **{
                    name: float(np.average([bin_[name] for bin_ in pooled[low]], weights=counts))
                    for name in ("confidence", "accuracy")
                },
            }
        )
    total = sum(bin_["count"] for bin_ in bins)
    error = sum(bin_["count"] * abs(bin_["accuracy"] - bin_["confidence"]) for bin_ in bins)
    return {"seeds": len(found), "ece": error / total if total else 0.0, "bins": bins}
