"""Everything the HTML page shows, as one JSON object: summaries, curves, heat maps, configuration.

Runs that differ only in the seed form a group: a row of the summary, a colour, a button. Curves
longer than `MOST_POINTS` are written as means of neighbouring tests.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedproto.config import flatten
from fedproto.errors import ConfigError, unknown_name
from fedproto.report.analysed import Analysis, Scores, embedded_pictures, read_analysis
from fedproto.report.figures import COLORS, NAMES
from fedproto.report.following import RunFollower
from fedproto.report.results import WINDOW, StoredRun, group_by_seed, main_score
from fedproto.report.summary import summarize
from fedproto.store import read_description
from fedproto.tasks import loss_beside, lower_is_better

MOST_POINTS = 2000
MOST_NOTES = 20
QUANTILES = 101


def page_content(
    followers: Sequence[RunFollower],
    *,
    metric: str | None = None,
    target: float | None = None,
    panels: Sequence[Mapping[str, Any]] = (),
    problems: Sequence[str] = (),
    pictures: bool = True,
) -> dict[str, Any]:
    """Gathers what the page shows.

    Args:
        followers: The runs, read.
        metric: The score to compare by; the task's main one by default.
        target: A value of it; adds the round that reaches it.
        panels: How the data is spread, from `data_panels`.
        problems: What the reader should know about what is missing.
        pictures: Whether to embed maps.

    Raises:
        ConfigError: If no run has such a metric.
    """
    runs = [follower.run for follower in followers]
    groups = group_by_seed(runs)
    known = {name for run in runs for record in run.records for name in record.metrics}
    if metric is not None and known and metric not in known:
        raise ConfigError(unknown_name("metric", metric, known))
    metric = metric or main_score(runs)
    names = _ordered(known, metric)
    follower_of = {follower.path: follower for follower in followers}
    analyses = {run.path: read_analysis(run.path) for run in runs}
    notes = [*problems, *(text for one in analyses.values() for text in one.problems)]
    return {
        "made": datetime.now(UTC).isoformat(timespec="seconds"),
        "colors": COLORS,
        "window": WINDOW,
        "metric": metric,
        "target": target,
        "metrics": [_metric(name) for name in names],
        "groups": _groups(groups, metric, target, names, analyses),
        "runs": [
            _run(follower_of[run.path], place, names, analyses[run.path])
            for place, group in enumerate(groups)
            for run in group
        ],
        "data": list(panels),
        "problems": notes,
        **({"maps": _maps(groups, analyses)} if pictures else {}),
    }


def _groups(
    groups: Sequence[Sequence[StoredRun]],
    metric: str,
    target: float | None,
    names: Sequence[str],
    analyses: Mapping[Path, Analysis],
) -> list[dict[str, Any]]:
    rows = summarize(groups, metric, target)
    result = []
    for row, group in zip(rows, groups, strict=True):
        values = {name: list(value) for name, value in row.values.items()}
        for name in names:
            last = [_last(run, name) for run in group]
            if name not in (metric, loss_beside(metric)) and None not in last:
                values[name] = [float(np.mean(last)), float(np.std(last))]  # type: ignore[arg-type]
        scores = [one for run in group if (one := analyses[run.path].scores) is not None]
        result.append(
            {
                "title": row.title,
                "seeds": [run.config.seed for run in group],
                "rounds": row.rounds,
                "planned": group[0].config.schedule.rounds,
                "values": values,
                "config": flatten(group[0].config.to_dict()),
                "fairness": _fairness(scores),
                "classes": _classes(scores, group),
            }
        )
    return result


def _run(
    follower: RunFollower, group: int, names: Sequence[str], analysis: Analysis
) -> dict[str, Any]:
    run = follower.run
    grid = follower.attention.grid()
    noted = [f"round {record.round + 1}: {record.note}" for record in run.records if record.note]
    environment = read_description(run.path).get("environment", {})
    return {
        "path": str(run.path),
        "group": group,
        "seed": run.config.seed,
        "planned": run.config.schedule.rounds,
        "rounds": len(run.records),
        "ended": follower.stop_reason,
        "seconds": sum(record.seconds for record in run.records),
        "curves": {name: curve for name in names if (curve := _curve(*run.curve(name)))},
        "attention": None if grid is None else grid.to_dict(),
        "failures": follower.failures,
        "notes": noted[:MOST_NOTES],
        "more_notes": max(0, len(noted) - MOST_NOTES),
        "environment": {key: _text(value) for key, value in environment.items()},
        "calibration": analysis.calibration,
        "embedding": analysis.embedding,
    }


def _curve(rounds: NDArray[np.int64], values: NDArray[np.float64]) -> dict[str, Any] | None:
    """A curve of at most `MOST_POINTS` points, ``joined`` neighbours make one; None without any.

    Where the rounds are evenly spaced, ``x`` is the first one, their distance and their number.
    """
    if not len(rounds):
        return None
    joined = math.ceil(len(rounds) / MOST_POINTS)
    if joined > 1:
        starts = np.arange(0, len(rounds), joined)
        sizes = np.diff(np.append(starts, len(rounds)))
        values = np.add.reduceat(values, starts) / sizes
        rounds = rounds[starts + sizes - 1]
    steps = np.unique(np.diff(rounds))
    even = len(steps) <= 1
    step = int(steps[0]) if even and len(steps) else 1
    return {
        "x": [int(rounds[0]), step, len(rounds)] if even else rounds.tolist(),
        "even": even,
        "y": base64.b64encode(values.astype("<f4").tobytes()).decode(),
        "joined": joined,
    }


def _last(run: StoredRun, name: str) -> float | None:
    """The mean of a metric over the last tenth of the run's rounds."""
    rounds, values = run.curve(name)
    if not len(rounds):
        return None
    width = max(1, round(WINDOW * run.config.schedule.rounds))
    return float(values[rounds > rounds[-1] - width].mean())


def _fairness(scores: Sequence[Scores]) -> dict[str, Any] | None:
    """Quantiles of the score over the clients of all seeds together."""
    values = np.sort([value for one in scores for value in one.clients])
    if not len(values):
        return None
    worst = values[: max(1, math.ceil(len(values) / 10))]
    return {
        "measure": scores[0].measure,
        "clients": len(values),
        "seeds": len(scores),
        "mean": float(values.mean()),
        "std": float(values.std()),
        "worst": float(worst.mean()),
        "quantiles": np.quantile(values, np.linspace(0, 1, QUANTILES)).round(5).tolist(),
    }


def _classes(scores: Sequence[Scores], group: Sequence[StoredRun]) -> dict[str, Any] | None:
    """The score per class, the mean over the seeds."""
    tables = [one.classes for one in scores]
    source = "analysis"
    if not tables:  # segmentation records IoU per class as it goes
        tables = [
            {
                name.removeprefix("iou_"): _last(run, name)
                for name in dict.fromkeys(n for record in run.records for n in record.metrics)
                if name.startswith("iou_")
            }
            for run in group
        ]
        source = "rounds"
    names = list(dict.fromkeys(name for table in tables for name in table))
    if not names:
        return None
    means = {
        name: float(np.mean(found))
        for name in names
        if (found := [v for table in tables if (v := table.get(name)) is not None])
    }
    return {"source": source, "values": {name: round(value, 5) for name, value in means.items()}}


def _maps(
    groups: Sequence[Sequence[StoredRun]], analyses: Mapping[Path, Analysis]
) -> list[dict[str, Any]]:
    """Pictures of the first run of each group that has some."""
    shown = []
    for place, group in enumerate(groups):
        with_maps = [run for run in group if analyses[run.path].maps]
        if with_maps:
            shown.append((place, with_maps[0].path))
    addresses = embedded_pictures([map_ for _, path in shown for map_ in analyses[path].maps])
    return [
        {
            "group": place,
            "path": str(path),
            "pictures": [
                {"name": map_.stem, "source": addresses[map_]}
                for map_ in analyses[path].maps
                if map_ in addresses
            ],
            "left_out": sum(map_ not in addresses for map_ in analyses[path].maps),
        }
        for place, path in shown
    ]


def _metric(name: str) -> dict[str, Any]:
    return {
        "name": name,
        "label": NAMES.get(name, name.replace("_", " ")),
        "percent": name.endswith(("accuracy", "ece")) or "iou" in name,
        "lower": lower_is_better(name),
    }


def _ordered(known: set[str], metric: str) -> list[str]:
    """The main score and its loss first, single classes last."""
    first = [name for name in (metric, loss_beside(metric)) if name in known]
    rest = sorted(known - set(first), key=lambda name: (name.startswith("iou_"), name))
    return first + rest


def _text(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {each}" for key, each in value.items())
    if isinstance(value, list):
        return "; ".join(str(each) for each in value)
    return str(value)
