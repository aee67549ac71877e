"""Figures: curves over rounds, and how attention is spread over clients."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fedproto.errors import ConfigError
from fedproto.report.results import StoredRun, titles
from fedproto.tasks import loss_beside

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Okabe and Ito's palette: told apart with all common kinds of colour vision.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#F0E442")
STYLES = ("-", "--", "-.", ":")
NAMES = {
    "accuracy": "test accuracy",
    "miou": "test mIoU",
    "validation_miou": "validation mIoU",
    "loss": "test loss",
    "train_loss": "training loss",
}


def save_figures(groups: Sequence[Sequence[StoredRun]], metric: str, folder: Path) -> list[Path]:
    """Draws all figures that the runs have data for.

    Args:
        groups: Runs that differ only in the seed, together.
        metric: The score for the curves.
        folder: Where to put the PNG files.

    Returns:
        The files written.

    Raises:
        ConfigError: If matplotlib is not installed.
    """
    _need_matplotlib()
    folder.mkdir(parents=True, exist_ok=True)
    written = [
        draw_curves(groups, name, folder / f"{name}.png") for name in (metric, loss_beside(metric))
    ]
    if any(attention_values(group) for group in groups):
        written.append(draw_attention(groups, folder / "attention.png"))
    return written


def draw_curves(groups: Sequence[Sequence[StoredRun]], metric: str, path: Path) -> Path:
    """Writes the curves of a metric."""
    curves(groups, metric).savefig(path, dpi=150)
    return path


def curves(groups: Sequence[Sequence[StoredRun]], metric: str) -> Figure:
    """Smoothed curves: the mean over seeds, with one standard deviation around it.

    Raises:
        ConfigError: If matplotlib is not installed.
    """
    _need_matplotlib()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.subplots()
    most_seeds = max(len(group) for group in groups)
    for place, (title, group) in enumerate(zip(titles(groups), groups, strict=True)):
        points = [run.smoothed(metric) for run in group]
        rounds = sorted(set.intersection(*(set(rounds.tolist()) for rounds, _ in points)))
        values = np.array([values[np.isin(at, rounds)] for at, values in points])
        mean, spread = values.mean(axis=0), values.std(axis=0)
        color, style = COLORS[place % len(COLORS)], STYLES[place // len(COLORS) % len(STYLES)]
        axes.plot(rounds, mean, style, color=color, label=title)
        if len(group) > 1:
            axes.fill_between(rounds, mean - spread, mean + spread, color=color, alpha=0.15, lw=0)
    axes.set_xlabel("round")
    axes.set_ylabel(NAMES.get(metric, metric.replace("_", " ")))
    spread_note = f", mean ± std of {most_seeds} seeds" if most_seeds > 1 else ""
    axes.set_title(f"moving average over 10 % of the rounds{spread_note}", fontsize="medium")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, fontsize="small")
    return figure


def draw_attention(groups: Sequence[Sequence[StoredRun]], path: Path) -> Path:
    """How often a client got which weight in the average, one panel per group."""
    from matplotlib.figure import Figure

    shown = [
        (title, values)
        for title, group in zip(titles(groups), groups, strict=True)
        if (values := attention_values(group))
    ]
    columns = min(3, len(shown))
    rows = -(-len(shown) // columns)
    figure = Figure(figsize=(3.2 * columns, 2.4 * rows), layout="constrained")
    panels = list(figure.subplots(rows, columns, squeeze=False, sharex=True).flat)
    bins = np.linspace(0, max(max(values) for _, values in shown), 40)
    for place, ((title, values), axes) in enumerate(zip(shown, panels, strict=False)):
        axes.hist(values, bins=list(bins), color=COLORS[place % len(COLORS)])
        axes.set_title(title, fontsize="small")
        axes.grid(alpha=0.3)
        axes.tick_params(labelbottom=True)
    for axes in panels[len(shown) :]:
        axes.set_visible(False)
    figure.supxlabel("federated attention value", fontsize="medium")
    figure.supylabel("occurrences", fontsize="medium")
    figure.savefig(path, dpi=150)
    return path


def _need_matplotlib() -> None:
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("figures need matplotlib: pip install 'fedproto[plots]'")


def attention_values(group: Sequence[StoredRun]) -> list[float]:
    """All attention values of rounds in which more than one client took part."""
    return [
        value
        for run in group
        for record in run.records
        if len(record.attention) > 1
        for value in record.attention.values()
    ]
