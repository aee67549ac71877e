"""The HTML page: one file with styles, scripts and data inside that loads nothing else.

Its parts are in ``page/`` as plain HTML, CSS and JavaScript. The data is one JSON object, with
curves of more than `MOST_POINTS` tests as means of neighbours.
"""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedproto.config import flatten
from fedproto.data.federation import cautions
from fedproto.data.tasks import is_share, loss_beside, lower_is_better
from fedproto.disk.files import write_output
from fedproto.measures.scores import PERSONAL_SCORES
from fedproto.report.arrangement import Arrangement, Group, arrange
from fedproto.report.figures import label_of
from fedproto.report.panels import (
    IOU,
    PageRun,
    attention,
    classes,
    embedded_pictures,
    fairness,
    page_run,
)
from fedproto.report.results import StoredRun, find_runs, main_score
from fedproto.report.statistics import FEWEST_PAIRS, SURE, WINDOW, t_quantile
from fedproto.report.style import DASHES, class_colors
from fedproto.report.summary import default_margin, figures_of
from fedproto.store import read_description

MOST_POINTS = 2000
MOST_NOTES = 20
_SHARED = ("base", "state", "charts", "pointing", "panels", "saving")
_SECTIONS = ("answer", "curves", "clients", "cost", "attention", "analysis")
_SCRIPTS = (*_SHARED, *_SECTIONS, "configuration", "main")


def write_page(
    directories: Sequence[Path],
    file: Path,
    *,
    title: str | None = None,
    metric: str | None = None,
    target: float | None = None,
) -> list[str]:
    """Writes one self-contained page about runs.

    Returns:
        Problems: runs and analyses that were left out, with reasons.
    """
    problems: list[str] = []
    runs = find_runs(directories, problems.append)
    content = page_content(runs, metric=metric, target=target, problems=problems)
    page = render(content, title or ", ".join(path.resolve().name for path in directories))
    write_output(file, page.encode())
    return list(content["problems"])


def render(content: Mapping[str, Any], title: str) -> str:
    """The page as text."""
    parts = {
        "title": escape(title),
        "style": _asset("page.css"),
        "script": "\n".join(_asset(f"{name}.js") for name in _SCRIPTS),
        "data": to_script_json({**content, "title": title}),
    }
    # One pass, so that what looks like a placeholder inside the data stays text.
    return re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], _asset("page.html"))


def to_script_json(content: Mapping[str, Any]) -> str:
    """JSON that is safe inside a script element, whatever the labels contain."""
    text = json.dumps(content, allow_nan=False, separators=(",", ":"))
    for character in "<>&":  # JSON has them only inside strings
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _asset(name: str) -> str:
    return (files("fedproto.report") / "page" / name).read_text(encoding="utf-8")


def page_content(
    runs: Sequence[StoredRun],
    *,
    metric: str | None = None,
    target: float | None = None,
    problems: Sequence[str] = (),
) -> dict[str, Any]:
    """Gathers the data of the page, in the page's order."""
    arrangement = arrange(runs)
    metric, names = _metrics(runs, metric)
    by_path = {run.path: page_run(run) for run in runs}
    most = max((len(group.seeds) for group in arrangement.groups), default=1)
    about = {path: one.run.about_data() for path, one in by_path.items()}
    chances = _chances(arrangement, about)
    return {
        "made": datetime.now(UTC).isoformat(timespec="seconds"),
        "dashes": DASHES,
        "window": WINDOW,
        "metric": metric,
        "target": target,
        "sure": SURE,
        "fewest": FEWEST_PAIRS,
        "quantiles": [0, *(t_quantile(freedom) for freedom in range(1, most))],
        "metrics": [_metric(name) for name in names],
        "methods": [
            {"title": method.title, **asdict(method.style)} for method in arrangement.methods
        ],
        "baselines": arrangement.baselines(),
        "conditions": [
            {**asdict(condition), "chance": chances.get(condition.family)}
            for condition in arrangement.conditions
        ],
        **_configurations(arrangement),
        "groups": [_group(group, names, metric, target, by_path) for group in arrangement.groups],
        "runs": [
            _run(run, number, names, about[run.path])
            for number, group in enumerate(arrangement.groups)
            for run in group.runs
        ],
        "repeated": list(arrangement.notices),
        "notices": [
            *dict.fromkeys((one["name"], text) for one in about.values() for text in cautions(one))
        ],
        "problems": [*problems, *(text for one in by_path.values() for text in one.problems)],
        "maps": _maps(arrangement.groups, by_path, about),
    }


def _metrics(runs: Sequence[StoredRun], metric: str | None) -> tuple[str, list[str]]:
    """The score to compare by, and all metrics: it and its loss first, single classes last."""
    known = {name for run in runs for record in run.records for name in record.metrics}
    metric = main_score(runs, metric)
    first = [name for name in (metric, loss_beside(metric)) if name in known]
    rest = sorted(known - set(first), key=lambda name: (name.startswith(IOU), name))
    return metric, first + rest


def _metric(name: str) -> dict[str, Any]:
    return {
        "name": name,
        "label": label_of(name),
        "percent": is_share(name) or name.endswith("ece"),
        "margin": default_margin(name),
        "lower": lower_is_better(name),
        "class": name.startswith(IOU),
        "personal": is_share(name) and name.startswith(tuple(PERSONAL_SCORES)),
    }


def _chances(arrangement: Arrangement, about: Mapping[Path, Mapping[str, Any]]) -> dict[str, float]:
    """The accuracy of guessing among the classes, by data set, where all runs have as many."""
    found: dict[str, set[int]] = defaultdict(set)
    for group in arrangement.groups:
        classes = about[group.runs[0].path].get("num_classes")
        if isinstance(classes, int) and classes > 0:  # a stranger's directory may say anything
            found[arrangement.conditions[group.conditions[0]].family].add(classes)
    return {family: 1 / min(known) for family, known in found.items() if len(known) == 1}


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


def _group(
    group: Group,
    names: Sequence[str],
    metric: str,
    target: float | None,
    runs: Mapping[Path, PageRun],
) -> dict[str, Any]:
    figures = [
        {
            **figures_of(run, metric, target),
            **{name: value for name in names if (value := run.final(name)) is not None},
        }
        for run in group.runs
    ]
    known = dict.fromkeys(name for one in figures for name in one)
    own = [runs[run.path] for run in group.runs]
    return {
        "title": group.title,
        "method": group.method,
        "conditions": group.conditions,
        "seeds": group.seeds,
        "rounds": min(len(run.records) for run in group.runs),
        "planned": group.runs[0].config.schedule.rounds,
        "pooled": group.runs[0].config.strategy.pooled,
        "figures": {name: [one.get(name) for one in figures] for name in known},
        "fairness": fairness(own),
        "classes": classes(own),
        "attention": attention(own),
        "embedding": next((one.embedding for one in own if one.embedding), None),
    }


def _run(
    run: StoredRun, group: int, names: Sequence[str], about: Mapping[str, Any]
) -> dict[str, Any]:
    noted = [f"round {record.round + 1}: {record.note}" for record in run.records if record.note]
    environment = read_description(run.path).get("environment", {})
    facts = {name: about[name] for name in ("clients", "train", "test") if name in about}
    traffic = [1e-6 * (record.bytes_up + record.bytes_down) for record in run.records]
    return {
        "path": str(run.path),
        "group": group,
        "seed": run.config.seed,
        "planned": run.config.schedule.rounds,
        "rounds": len(run.records),
        "ended": run.config.stop_reason(run.records),
        "curves": {name: curve for name in names if (curve := _curve(*run.curve(name)))},
        "megabytes": _running_total(traffic),
        "seconds": _running_total([record.seconds for record in run.records]),
        "failures": sum(len(record.failures) for record in run.records),
        "notes": noted[:MOST_NOTES],
        "more_notes": max(0, len(noted) - MOST_NOTES),
        "data": _text(facts),
        "environment": {key: _text(value) for key, value in environment.items()},
    }


def _curve(rounds: NDArray[np.int64], values: NDArray[np.float64]) -> dict[str, Any] | None:
    """A curve of at most `MOST_POINTS` points, each the mean of ``joined`` tests; None if empty."""
    if not len(rounds):
        return None
    joined = math.ceil(len(rounds) / MOST_POINTS)
    starts = np.arange(0, len(rounds), joined)
    sizes = np.diff(np.append(starts, len(rounds)))
    means = np.add.reduceat(values, starts) / sizes
    return {"x": rounds[starts + sizes - 1].tolist(), "y": _short(means), "joined": joined}


def _running_total(amounts: Sequence[float]) -> dict[str, Any]:
    """The amount spent in all, and until every ``step``-th round."""
    spent = np.cumsum(np.asarray(amounts, dtype=np.float64))
    step = max(1, math.ceil(len(spent) / MOST_POINTS))
    return {"total": float(sum(amounts)), "step": step, "spent": _short(spent[step - 1 :: step])}


def _short(values: NDArray[np.float64]) -> list[float]:
    return [float(f"{value:.8g}") for value in values.tolist()]


def _maps(
    groups: Sequence[Group],
    runs: Mapping[Path, PageRun],
    about: Mapping[Path, Mapping[str, Any]],
) -> list[dict[str, Any]]:
    """Pictures of the first run of each group that has some; the first class is background."""
    found = []
    for number, group in enumerate(groups):
        path = next((run.path for run in group.runs if runs[run.path].maps), None)
        if path is not None:
            names = about[path].get("class_names", ())
            colored = [*zip(names, class_colors(len(names), label_maps=True), strict=True)]
            pictures = embedded_pictures(runs[path].maps)
            found.append({"group": number, "classes": colored[1:], "pictures": pictures})
    return found


def _text(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {each}" for key, each in value.items())
    if isinstance(value, list):
        return "; ".join(str(each) for each in value)
    return str(value)
