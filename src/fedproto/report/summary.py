"""A table of runs: one row per group, with scores, area, traffic, time and a verdict."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedproto.data.tasks import loss_beside, lower_is_better
from fedproto.errors import ConfigError, unknown_name
from fedproto.report.arrangement import Arrangement, Group
from fedproto.report.evidence import Difference, Verdict, difference, holm, sample_deviation
from fedproto.report.results import StoredRun


@dataclass(frozen=True)
class Against:
    """A group against the baseline's under the same condition, seed by seed.

    Attributes:
        baseline: The method it is compared with.
        corrected_p: Its p-value, corrected by Holm for all comparisons of the table.
    """

    baseline: str
    difference: Difference
    corrected_p: float | None
    verdict: Verdict


@dataclass(frozen=True)
class Summary:
    """One row of a comparison.

    Attributes:
        condition: What it was run under; empty where all runs share one.
        seeds: What the figures are the mean over.
        values: Mean and sample standard deviation over seeds per figure; None as the deviation for
            one seed. A figure that some run does not have is left out.
        against: What became of it beside the baseline; None for the baseline itself, where that was
            not run, and for pooled training beside several conditions.
    """

    title: str
    method: str
    condition: str
    seeds: list[int]
    rounds: int
    values: dict[str, tuple[float, float | None]]
    against: Against | None
    directories: list[str]


def summarize(
    arrangement: Arrangement, metric: str, target: float | None = None, baseline: str | None = None
) -> list[Summary]:
    """One row per group."""
    figures = [
        by_seed(group, lambda run: figures_of(run, metric, target)) for group in arrangement.groups
    ]
    against = _against(arrangement, [each.get(metric, {}) for each in figures], metric, baseline)
    return [
        Summary(
            title=group.title,
            method=arrangement.methods[group.method].title,
            condition=_condition(arrangement, group),
            seeds=group.seeds,
            rounds=min(len(run.records) for run in group.runs),
            values={
                name: (float(np.mean(values)), sample_deviation(values))
                for name, found in own.items()
                if len(values := list(found.values())) == len(group.seeds)
            },
            against=verdict,
            directories=[str(run.path) for run in group.runs],
        )
        for group, own, verdict in zip(arrangement.groups, figures, against, strict=True)
    ]


def by_seed(
    group: Group, figures: Callable[[StoredRun], Mapping[str, float]]
) -> dict[str, dict[int, float]]:
    """Each figure of a group per seed that has it; a seed that was run twice counts once."""
    found: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for run in group.runs:
        for name, value in figures(run).items():
            found[name][run.config.seed].append(value)
    times = Counter(run.config.seed for run in group.runs)
    return {
        name: {
            seed: float(np.mean(values))
            for seed, values in per_seed.items()
            if len(values) == times[seed]
        }
        for name, per_seed in found.items()
    }


def differences(ours: Mapping[int, float], theirs: Mapping[int, float]) -> Difference | None:
    """Of the seeds that both have; None where they share none."""
    shared = [ours[seed] - theirs[seed] for seed in ours if seed in theirs]
    return difference(shared) if shared else None


def _against(
    arrangement: Arrangement,
    scores: Iterable[Mapping[int, float]],
    metric: str,
    baseline: str | None,
) -> list[Against | None]:
    groups, found = arrangement.groups, list(scores)
    titles = [method.title for method in arrangement.methods]
    chosen = baseline or (arrangement.first if titles else "")
    if baseline is not None and baseline not in titles:
        raise ConfigError(f"--baseline: {unknown_name('method', baseline, titles)}")
    theirs: dict[int, dict[int, float]] = defaultdict(dict)
    for group, values in zip(groups, found, strict=True):
        if titles[group.method] == chosen:
            for condition in group.conditions:
                theirs[condition].update(values)
    pairs = [
        differences(values, theirs.get(group.conditions[0], {}))
        if titles[group.method] != chosen and len(group.conditions) == 1
        else None
        for group, values in zip(groups, found, strict=True)
    ]
    corrected = holm([None if pair is None else pair.p for pair in pairs])
    lower = lower_is_better(metric)
    return [
        None if pair is None else Against(chosen, pair, p, pair.verdict(lower_is_better=lower))
        for pair, p in zip(pairs, corrected, strict=True)
    ]


def _condition(arrangement: Arrangement, group: Group) -> str:
    titles = [arrangement.conditions[condition].title for condition in group.conditions]
    return "; ".join(title for title in titles if title)


def figures_of(run: StoredRun, metric: str, target: float | None = None) -> dict[str, float]:
    """What a table says of one run."""
    figures: dict[str, float] = {}
    for title, name in ((metric, metric), ("loss", loss_beside(metric))):
        value = run.final(name)
        if value is not None:
            figures[title] = value
    rounds, values = run.smoothed(metric)
    if len(values):
        figures["area"] = _area(rounds, values)
        if target is not None:
            reached = rounds[values <= target if lower_is_better(metric) else values >= target]
            if len(reached):
                figures["rounds to target"] = float(reached[0])
    figures["bytes up"] = float(sum(record.bytes_up for record in run.records))
    figures["bytes down"] = float(sum(record.bytes_down for record in run.records))
    figures["seconds"] = sum(record.seconds for record in run.records)
    return figures


def _area(rounds: NDArray[np.int64], values: NDArray[np.float64]) -> float:
    """Area under a curve divided by its width: the mean score over the rounds."""
    if len(rounds) == 1:
        return float(values[0])
    widths = np.diff(rounds)
    return float(np.sum(widths * (values[1:] + values[:-1]) / 2) / widths.sum())
