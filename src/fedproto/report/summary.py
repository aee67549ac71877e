"""A table of runs: one row per group, with final scores, area under the curve, traffic and time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedproto.report.results import StoredRun, titles
from fedproto.report.shared import comparable
from fedproto.tasks import loss_beside, lower_is_better


@dataclass(frozen=True)
class Summary:
    """One row of a comparison.

    Attributes:
        title: The runs' label.
        runs: How many runs (seeds) it is the mean of.
        rounds: Rounds done.
        values: Mean and standard deviation per figure; the deviation is 0 for one run. A figure
            that some run does not have is left out.
        seeds: Those of the runs.
        directories: Where the runs are.
    """

    title: str
    runs: int
    rounds: int
    values: dict[str, tuple[float, float]]
    seeds: list[int]
    directories: list[str]


def summarize(
    groups: Sequence[Sequence[StoredRun]], metric: str, target: float | None
) -> list[Summary]:
    """One row per group; federated runs on the same data are compared at the rounds they share.

    Args:
        groups: Runs that belong together.
        metric: The score to compare by, such as accuracy.
        target: A value of it; adds the first round whose smoothed score reaches it.
    """
    rows = []
    aligned = iter(comparable(run for group in groups for run in group))
    for title, group in zip(titles(groups), groups, strict=True):
        figures = [_figures(next(aligned), metric, target) for _ in group]
        common = [name for name in figures[0] if all(name in each for each in figures)]
        rows.append(
            Summary(
                title=title,
                runs=len(group),
                rounds=min(len(run.records) for run in group),
                values={
                    name: (
                        float(np.mean([each[name] for each in figures])),
                        float(np.std([each[name] for each in figures])),
                    )
                    for name in common
                },
                seeds=[run.config.seed for run in group],
                directories=[str(run.path) for run in group],
            )
        )
    return rows


def _figures(run: StoredRun, metric: str, target: float | None) -> dict[str, float]:
    figures: dict[str, float] = {}
    for title, name in ((metric, metric), ("loss", loss_beside(metric))):
        rounds, values = run.smoothed(name)
        if len(values):
            figures[title] = float(values[-1])
        if name == metric and len(values):
            figures["area"] = _area(rounds, values)
            if target is not None:
                reached = rounds[values <= target if lower_is_better(name) else values >= target]
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
