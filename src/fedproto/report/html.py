"""The HTML page: one file with styles, scripts and data inside that loads nothing else.

Its parts are in ``page/`` as plain HTML, CSS and JavaScript. Curves longer than `MOST_POINTS` are
written as means of neighbouring tests.
"""

from __future__ import annotations

import base64
import json
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedproto.config import flatten
from fedproto.data.federation import uneven_test
from fedproto.data.tasks import is_share, loss_beside, lower_is_better
from fedproto.disk.files import explained, write_atomically
from fedproto.errors import ConfigError, StoreError, unknown_name
from fedproto.measures.scores import summarize_clients
from fedproto.report.arrangement import Arrangement, Group, arrange
from fedproto.report.figures import NAMES
from fedproto.report.panels import (
    CLASS,
    Analysis,
    AttentionShares,
    DataPanels,
    Followers,
    Holdings,
    RunFollower,
    Scores,
    binned,
    embedded_pictures,
    read_analysis,
)
from fedproto.report.results import StoredRun, main_score
from fedproto.report.statistics import FEWEST_PAIRS, SURE, WINDOW, t_quantile
from fedproto.report.style import DASHES
from fedproto.report.summary import default_margin, figures_of
from fedproto.store import read_description
from fedproto.store.checking import read_audit

_SCRIPTS = (
    "base.js",
    "state.js",
    "charts.js",
    "pointing.js",
    "panels.js",
    "saving.js",
    "answer.js",
    "curves.js",
    "clients.js",
    "cost.js",
    "attention.js",
    "data.js",
    "analysis.js",
    "configuration.js",
    "main.js",
)


def render(content: Mapping[str, Any], title: str, *, live: bool = False) -> str:
    """The page as text."""
    parts = {
        "title": escape(title),
        "connect": "'self'" if live else "'none'",
        "style": _asset("page.css"),
        "script": "\n".join(_asset(name) for name in _SCRIPTS),
        "data": to_script_json({**content, "title": title, "live": live}),
    }
    # One pass, so that what looks like a placeholder inside the data stays text.
    return re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], _asset("page.html"))


def to_script_json(content: Mapping[str, Any]) -> str:
    """JSON that is safe inside a script element, whatever the labels say."""
    text = json.dumps(content, allow_nan=False, separators=(",", ":"))
    for character in "<>&":  # elsewhere than in texts JSON has none of them
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _asset(name: str) -> str:
    return (files("fedproto.report") / "page" / name).read_text(encoding="utf-8")


def write_page(
    directories: Sequence[Path],
    file: Path,
    *,
    title: str | None = None,
    metric: str | None = None,
    target: float | None = None,
    panels: DataPanels | None = None,
) -> list[str]:
    """Writes one self-contained page about runs; what had to be left out, and why."""
    runs, unread = Followers(directories).update(forgiving=True)
    if unread and not runs:
        raise StoreError(unread[0])
    if not runs:
        folders = ", ".join(str(path) for path in directories)
        raise StoreError(f"{folders} holds no run: no run.json in it or below")
    content = page_content(runs, metric=metric, target=target, panels=panels, problems=unread)
    page = render(content, title or ", ".join(path.resolve().name for path in directories))
    with explained(file, " cannot be written", "; choose another file"):
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, page.encode())
    return list(content["problems"])


MOST_POINTS = 2000
MOST_NOTES = 20
MOST_NOTICES = 3
QUANTILES = 101
_IOU = "iou_"
_CLASSES = (_IOU, CLASS)


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
    about = {path: read_description(path).get("data", {}) for path in by_path}
    chance = _chances(arrangement, about)
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
        "baselines": arrangement.baselines(),
        "conditions": [
            {
                "title": each.title,
                "family": each.family,
                "parts": dict(each.parts),
                "chance": chance.get(number),
            }
            for number, each in enumerate(arrangement.conditions)
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
        "notices": [*_one_line(arrangement.notices), *_uneven(about.values())],
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
    seeds = group.seeds
    per_run = [
        {
            **figures_of(run, metric, target),
            **{name: value for name in names if (value := run.final(name)) is not None},
        }
        for run in group.runs
    ]
    known = dict.fromkeys(name for one in per_run for name in one)
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
        "pooled": group.runs[0].config.strategy.pooled,
        "figures": {name: [one.get(name) for one in per_run] for name in known},
        "fairness": fairness(scores, holdings),
        "classes": classes(scores, group.runs),
        "calibration": calibration([one.calibration for one in own if one.calibration]),
        "attention": attention([followers[run.path].attention for run in group.runs], holdings),
        "embedding": embeddings[0] if embeddings else None,
    }


def _chances(arrangement: Arrangement, about: Mapping[Path, Mapping[str, Any]]) -> dict[int, float]:
    """The accuracy of guessing among the classes, by condition whose data is described."""
    return {
        number: 1 / classes
        for group in arrangement.groups
        for number in group.conditions
        if (classes := about[group.runs[0].path].get("num_classes"))
    }


def _one_line(notices: Sequence[str]) -> list[str]:
    """The first notices and the number of the others, as one paragraph."""
    more = [f"and {len(notices) - MOST_NOTICES} more"] if len(notices) > MOST_NOTICES else []
    return ["; ".join([*notices[:MOST_NOTICES], *more])] if notices else []


def _uneven(about: Iterable[Mapping[str, Any]]) -> list[str]:
    # What a stranger's run directory says of its data may be anything.
    shares = {
        str(one.get("name", "")): share
        for one in about
        if isinstance(share := one.get("largest_test_share", 0.0), float) and 0 <= share <= 1
    }
    return [text for name, share in shares.items() if (text := uneven_test(name, share))]


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
        "percent": is_share(name) or name.endswith("ece") or name.startswith(CLASS),
        "margin": default_margin(name),
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


def fairness(scores: Sequence[Scores], holdings: Holdings | None) -> dict[str, Any] | None:
    """Mean client, worst tenth and share at zero, each the mean over seeds; quantiles of all."""
    values = np.sort([value for one in scores for value in one.clients.values()])
    if not len(values):
        return None
    per_seed = [summarize_clients(list(one.clients.values())) for one in scores if one.clients]
    mean, worst, zero = np.mean(per_seed, axis=0).tolist()
    return {
        "measure": scores[0].measure,
        "round": max(one.round for one in scores),
        "clients": len(values),
        "seeds": len(scores),
        "mean": mean,
        "std": float(values.std()),
        "zero": zero,
        "worst": worst,
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


def attention(found: Sequence[AttentionShares], holdings: Holdings | None) -> dict[str, Any] | None:
    """How far a method is from weighing clients alike; None where no round had two clients."""
    known = [means for one in found if (means := one.means())]
    if not known:
        return None
    values = [value for means in known for value in means.values()]
    return {"low": min(values), "high": max(values), **held(known, holdings)}


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


def accounts(runs: Iterable[Path]) -> dict[str, Any]:
    """A row per client and what happened beside rounds; empty where nothing was deployed.

    A sweep's log lies in the folder above its runs.
    """
    folders = {folder for run in runs for folder in (run, run.parent)}
    events: list[dict[str, Any]] = []
    problems = []
    for folder in sorted(folders):
        try:
            events += read_audit(folder)
        except StoreError as error:
            problems.append(str(error))
    clients: dict[int, dict[str, Any]] = {}
    incidents = []
    for event in events:
        kind = event.get("event")
        if kind == "enrolled":
            row = _row(clients, int(event["client"]))
            row |= {"name": event["name"], "key": event["key"], "samples": event["num_train"]}
        elif kind == "round":
            for client, share in event["shares"].items():
                row = _row(clients, int(client))
                row["rounds"] += 1
                row["total"] += share
            for client, reason in event["refused"].items():
                row = _row(clients, int(client))
                row["refused"] += 1
                row["reason"] = reason
        elif kind == "turned away":
            incidents.append(f"{event['time']}: {event['name'] or event['node']} turned away")
    rows = [row | {"client": client} for client, row in sorted(clients.items())]
    return {"clients": rows, "incidents": incidents[-20:], "problems": problems}


def _row(clients: dict[int, dict[str, Any]], client: int) -> dict[str, Any]:
    fresh = {"name": "", "key": None, "samples": None, "rounds": 0, "total": 0.0}
    return clients.setdefault(client, fresh | {"refused": 0, "reason": ""})
