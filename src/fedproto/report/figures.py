"""Figures: curves over rounds, and how attention is spread over clients."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedproto.data.tasks import loss_beside
from fedproto.report.arrangement import Arrangement
from fedproto.report.looks import Look, add_legend, literal, panel_grid, save_figure
from fedproto.report.results import WINDOW, StoredRun

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAMES = {
    "accuracy": "test accuracy",
    "miou": "test mIoU",
    "validation_miou": "validation mIoU",
    "loss": "test loss",
    "train_loss": "training loss",
}
_COLUMNS = 3


def save_figures(arrangement: Arrangement, metric: str, folder: Path) -> list[Path]:
    """Draws all figures that the runs have data for."""
    written = [
        draw_curves(arrangement, name, folder / f"{name}.png")
        for name in (metric, loss_beside(metric))
    ]
    if any(attention_values(group.runs) for group in arrangement.groups):
        written.append(draw_attention(arrangement, folder / "attention.png"))
    return written


def draw_curves(arrangement: Arrangement, metric: str, path: Path) -> Path:
    """Writes the curves of a metric."""
    return save_figure(curves(arrangement, metric), path)


def curves(arrangement: Arrangement, metric: str) -> Figure:
    """Smoothed curves, a panel per condition: means over seeds within one standard deviation."""
    conditions = list(enumerate(arrangement.conditions))
    size = (4.2, 2.9) if len(conditions) > 1 else (6.8, 4.0)
    figure, panels = panel_grid(len(conditions), _COLUMNS, size, (1.2, 0.8))
    handles: dict[str, Any] = {}
    most_seeds = max((len(group.seeds) for group in arrangement.groups), default=1)
    for axes, (index, condition) in zip(panels, conditions, strict=True):
        for group in arrangement.groups:
            if index in group.conditions:
                method = arrangement.methods[group.method]
                line = _draw_group(axes, group.runs, metric, method.look)
                if line is not None:
                    handles.setdefault(method.title, line)
        axes.set_title(literal(condition.title), fontsize="small")
        axes.grid(alpha=0.3)
    note = f"moving average over {100 * WINDOW:.0f} % of the rounds"
    if most_seeds > 1:
        note += f"; mean ± sample standard deviation of {most_seeds} seeds"
    figure.supxlabel(f"round\n{note}", fontsize="small")
    figure.supylabel(literal(NAMES.get(metric, metric.replace("_", " "))), fontsize="medium")
    add_legend(figure, handles)
    return figure


def draw_attention(arrangement: Arrangement, path: Path) -> Path:
    """How often a client got which weight in the average, one panel per group."""
    shown = [
        (group, values) for group in arrangement.groups if (values := attention_values(group.runs))
    ]
    figure, panels = panel_grid(len(shown), _COLUMNS, (3.2, 2.4), (1.2, 0.8))
    bins = np.linspace(0, max(max(values) for _, values in shown), 40)
    for (group, values), axes in zip(shown, panels, strict=True):
        axes.hist(values, bins=list(bins), color=arrangement.methods[group.method].look.color)
        axes.set_title(literal(group.title), fontsize="small")
        axes.grid(alpha=0.3)
    figure.supxlabel("federated attention value", fontsize="medium")
    figure.supylabel("occurrences", fontsize="medium")
    return save_figure(figure, path)


def attention_values(runs: Iterable[StoredRun]) -> list[float]:
    """All attention values of rounds in which more than one client took part."""
    return [
        value
        for run in runs
        for record in run.records
        if len(record.attention) > 1
        for value in record.attention.values()
    ]


def _draw_group(axes: Any, runs: Iterable[StoredRun], metric: str, look: Look) -> Any:
    """The line of a group; None where the metric was not taken."""
    curves = [curve for run in runs if len((curve := run.smoothed(metric))[0])]
    rounds = sorted(set.intersection(*(set(at.tolist()) for at, _ in curves))) if curves else []
    if not rounds:
        return None
    values = np.array([values[np.isin(at, rounds)] for at, values in curves])
    mean = values.mean(axis=0)
    (line,) = axes.plot(rounds, mean, color=look.color, linestyle=look.linestyle)
    if len(curves) > 1:
        spread = values.std(axis=0, ddof=1)
        axes.fill_between(rounds, mean - spread, mean + spread, color=look.color, alpha=0.15, lw=0)
    return line
