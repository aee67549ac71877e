"""Everything the HTML page shows, as one JSON object: methods, conditions, groups, runs, curves.

Curves longer than `MOST_POINTS` are written as means of neighbouring tests.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedproto.config import flatten
from fedproto.data.tasks import loss_beside, lower_is_better
from fedproto.errors import ConfigError, unknown_name
from fedproto.report import groups as facts
from fedproto.report.accounts import accounts
from fedproto.report.analysed import Analysis, Scores, embedded_pictures, read_analysis
from fedproto.report.arrangement import Arrangement, Group, arrange
from fedproto.report.evidence import FEWEST_PAIRS, SURE, t_quantile
from fedproto.report.figures import NAMES
from fedproto.report.following import CLASS, RunFollower
from fedproto.report.looks import DASHES
from fedproto.report.results import WINDOW, StoredRun, main_score
from fedproto.report.spread import DataPanels, Holdings
from fedproto.report.summary import by_seed, figures_of
from fedproto.store import read_description

MOST_POINTS = 2000
MOST_NOTES = 20
_CLASSES = ("iou_", CLASS)


# Long: all that the page shows, in the page's order.
def page_content(
    followers: Sequence[RunFollower],
    *,
    metric: str | None = None,
    target: float | None = None,
    panels: DataPanels | None = None,
    problems: Sequence[str] = (),
    pictures: bool = True,
    known: Sequence[str] = (),
) -> dict[str, Any]:
    """Gathers what the page shows.

    Methods that were `known` in an earlier state of the page keep their colours.
    """
    arrangement = arrange((follower.run for follower in followers), known)
    metric, names = _metrics(followers, metric)
    by_path = {follower.path: follower for follower in followers}
    analyses = {path: read_analysis(path) for path in by_path}
    most = max((len(group.seeds) for group in arrangement.groups), default=1)
    audit = accounts(by_path)
    return {
        "made": datetime.now(UTC).isoformat(timespec="seconds"),
        "dashes": DASHES,
        "window": WINDOW,
        "metric": metric,
        "loss": loss_beside(metric),
        "target": target,
        "sure": SURE,
        "fewest": FEWEST_PAIRS,
        "quantiles": [0, *(t_quantile(freedom) for freedom in range(1, most))],
        "metrics": [_metric(name) for name in names],
        "methods": [
            {"title": method.title, **asdict(method.look)} for method in arrangement.methods
        ],
        "first": arrangement.first if arrangement.methods else None,
        "conditions": [
            {"title": each.title, "family": each.family, "parts": dict(each.parts)}
            for each in arrangement.conditions
        ],
        **_configurations(arrangement),
        "groups": [
            _group(group, names, metric, target, by_path, analyses, panels)
            for group in arrangement.groups
        ],
        "runs": [
            _run(run, by_path[run.path], number, names)
            for number, group in enumerate(arrangement.groups)
            for run in group.runs
        ],
        "data": []
        if panels is None
        else panels.of(group.runs[0].config for group in arrangement.groups),
        "audit": audit,
        "problems": [
            *problems,
            *audit["problems"],
            *(text for one in analyses.values() for text in one.problems),
        ],
        **({"maps": _maps(arrangement.groups, analyses)} if pictures else {}),
    }


def _group(
    group: Group,
    names: Sequence[str],
    metric: str,
    target: float | None,
    followers: Mapping[Path, RunFollower],
    analyses: Mapping[Path, Analysis],
    panels: DataPanels | None,
) -> dict[str, Any]:
    def figures(run: StoredRun) -> dict[str, float]:
        finals = {name: value for name in names if (value := run.final(name)) is not None}
        return {**figures_of(run, metric, target), **finals}

    per_seed = by_seed(group, figures)
    seeds = group.seeds
    own = [analyses[run.path] for run in group.runs]
    scores = [
        newest
        for run in group.runs
        if (newest := _newest(analyses[run.path].scores, followers[run.path].scores)) is not None
    ]
    holdings: Holdings | None = None if panels is None else panels.holdings(group.runs[0].config)
    embeddings = [one.embedding for one in own if one.embedding is not None]
    return {
        "title": group.title,
        "method": group.method,
        "conditions": group.conditions,
        "seeds": seeds,
        "rounds": min(len(run.records) for run in group.runs),
        "planned": group.runs[0].config.schedule.rounds,
        "figures": {name: [found.get(seed) for seed in seeds] for name, found in per_seed.items()},
        "fairness": facts.fairness(scores, holdings),
        "classes": facts.classes(scores, group.runs),
        "calibration": facts.calibration([one.calibration for one in own if one.calibration]),
        "attention": facts.attention(
            [followers[run.path].attention for run in group.runs], holdings
        ),
        "embedding": embeddings[0] if embeddings else None,
    }


def _newest(*found: Scores | None) -> Scores | None:
    """Of what was analysed and what was recorded in training, what is about the later model."""
    return max((one for one in found if one is not None), key=lambda one: one.round, default=None)


def _run(run: StoredRun, follower: RunFollower, group: int, names: Sequence[str]) -> dict[str, Any]:
    noted = [f"round {record.round + 1}: {record.note}" for record in run.records if record.note]
    environment = read_description(run.path).get("environment", {})
    traffic = [1e-6 * (record.bytes_up + record.bytes_down) for record in run.records]
    return {
        "path": str(run.path),
        "group": group,
        "seed": run.config.seed,
        "planned": run.config.schedule.rounds,
        "rounds": len(run.records),
        "ended": follower.stop_reason,
        "curves": {name: curve for name in names if (curve := _curve(*run.curve(name)))},
        "megabytes": _clock(traffic),
        "seconds": _clock([record.seconds for record in run.records]),
        "failures": follower.failures,
        "notes": noted[:MOST_NOTES],
        "more_notes": max(0, len(noted) - MOST_NOTES),
        "environment": {key: _text(value) for key, value in environment.items()},
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
        "y": _packed(values),
        "joined": joined,
    }


def _clock(amounts: Sequence[float]) -> dict[str, Any]:
    """What had been spent after each round: in all, and every ``step`` rounds."""
    spent = np.cumsum(np.asarray(amounts, dtype=np.float64))
    if len(set(amounts)) < 2:
        return {"total": float(spent[-1]) if len(spent) else 0.0, "step": 0, "spent": ""}
    step = math.ceil(len(spent) / MOST_POINTS)
    return {"total": float(spent[-1]), "step": step, "spent": _packed(spent[step - 1 :: step])}


def _packed(values: NDArray[np.float64]) -> str:
    with np.errstate(over="ignore"):
        return base64.b64encode(values.astype("<f4").tobytes()).decode()


def _configurations(arrangement: Arrangement) -> dict[str, Any]:
    """The options that all groups share, and those in which they differ, per group."""
    tables = [flatten(group.runs[0].config.to_dict()) for group in arrangement.groups]
    for table in tables:
        table.pop("seed")
    names = list(dict.fromkeys(name for table in tables for name in table))
    differ = [name for name in names if len({str(table.get(name)) for table in tables}) > 1]
    return {
        "common": {name: tables[0][name] for name in names if name not in differ},
        "differing": {name: [table.get(name) for table in tables] for name in differ},
    }


def _maps(groups: Sequence[Group], analyses: Mapping[Path, Analysis]) -> list[dict[str, Any]]:
    """Pictures of the first run of each group that has some."""
    shown = []
    for number, group in enumerate(groups):
        with_maps = [run for run in group.runs if analyses[run.path].maps]
        if with_maps:
            shown.append((number, with_maps[0].path))
    addresses = embedded_pictures([map_ for _, path in shown for map_ in analyses[path].maps])
    return [
        {
            "group": number,
            "path": str(path),
            "pictures": {
                map_.stem: addresses[map_] for map_ in analyses[path].maps if map_ in addresses
            },
            "left_out": sum(map_ not in addresses for map_ in analyses[path].maps),
        }
        for number, path in shown
    ]


def _metric(name: str) -> dict[str, Any]:
    return {
        "name": name,
        "label": NAMES.get(name, name.replace("_", " ")),
        "percent": name.endswith(("accuracy", "ece")) or "iou" in name or name.startswith(CLASS),
        "lower": lower_is_better(name),
        "class": name.startswith(_CLASSES),
    }


def _metrics(followers: Sequence[RunFollower], metric: str | None) -> tuple[str, list[str]]:
    """The score to compare by, and all: it and its loss first, single classes last."""
    known = {
        name for follower in followers for record in follower.records for name in record.metrics
    }
    if metric is not None and known and metric not in known:
        raise ConfigError(unknown_name("metric", metric, known))
    metric = metric or main_score(follower.run for follower in followers)
    first = [name for name in (metric, loss_beside(metric)) if name in known]
    rest = sorted(known - set(first), key=lambda name: (name.startswith(_CLASSES), name))
    return metric, first + rest


def _text(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {each}" for key, each in value.items())
    if isinstance(value, list):
        return "; ".join(str(each) for each in value)
    return str(value)
