"""Figures for papers: curves over rounds, differences as a forest plot, and a federation's data."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np

from fedproto.data.federation import Federation, class_counts
from fedproto.data.tasks import is_share, loss_beside
from fedproto.report.arrangement import Arrangement, Method
from fedproto.report.results import StoredRun
from fedproto.report.style import (
    COLORS,
    LineStyle,
    add_legend,
    legend_columns,
    literal,
    need_matplotlib,
    new_figure,
    panel_grid,
    save_figure,
)
from fedproto.report.summary import Against, Summary
from fedproto.rng import Indices

if TYPE_CHECKING:
    from matplotlib.figure import Figure


_LABELS = {
    "accuracy": "test accuracy",
    "miou": "test mIoU",
    "validation_miou": "validation mIoU",
    "loss": "test loss",
    "train_loss": "training loss",
}
FigureFormat: TypeAlias = Literal["pdf", "svg", "png"]
FigureWidth: TypeAlias = Literal["column", "page"]
"""Of a column, or of a page of a two-column paper."""

_INCHES = {"column": 3.35, "page": 6.9}
_COLUMNS = 3
_FEW_SEEDS = 6
"""Number of seeds from which a band is drawn instead of a thin line per seed."""

SHOWN_CLIENTS = 30
# From the ninth class on the colours repeat with another pattern.
_HATCHES = ("", "////", "....", "xxxx", "----", "oooo", "||||", "++++")


def label_of(metric: str) -> str:
    """The title of a metric's axis."""
    return _LABELS.get(metric, metric.replace("_", " "))


def save_figures(
    arrangement: Arrangement,
    metric: str,
    folder: Path,
    format_: FigureFormat = "png",
    width: FigureWidth = "page",
    rows: Sequence[Summary] = (),
) -> list[Path]:
    """Draws all figures that the runs have data for."""
    need_matplotlib()
    from matplotlib import rc_context

    written = []
    with rc_context({"font.size": 7, "lines.linewidth": 1, "axes.linewidth": 0.6}):  # for papers
        names = metric, loss_beside(metric)
        figures = {name: curves(arrangement, name, width) for name in names}
        if any(row.against is not None for row in rows):
            figures["differences"] = forest(arrangement, rows, metric, width)
        for name, figure in figures.items():
            path = folder / f"{name}.{format_}"
            written.append(save_figure(figure, path, dpi=300))
    return written


def curves(arrangement: Arrangement, metric: str, width: FigureWidth = "page") -> Figure:
    """Smoothed curves, a panel per condition: means over seeds, each seed thinly or as a band."""
    drawn = [
        one for one in arrangement.groups if any(len(run.curve(metric)[0]) for run in one.runs)
    ]
    shown = {index for group in drawn for index in group.conditions}
    conditions = [one for one in enumerate(arrangement.conditions) if one[0] in shown]
    alike = len({condition.family for _, condition in conditions}) == 1
    figure, panels = _panels(
        len(conditions), 4, width, sharex=alike, sharey=alike, entries=len(arrangement.methods)
    )
    handles: dict[str, Any] = {}
    for axes, (index, condition) in zip(panels, conditions, strict=True):
        for group in drawn:
            if index in group.conditions:
                method = arrangement.methods[group.method]
                line = _draw_group(axes, group.runs, metric, method.style)
                if line is not None:
                    handles.setdefault(method.title, line)
        axes.set_title(literal(condition.title), fontsize="small")
        axes.grid(alpha=0.3)
    figure.supxlabel("round", fontsize="small")
    figure.supylabel(literal(label_of(metric)), fontsize="medium")
    add_legend(figure, handles)
    return figure


def forest(
    arrangement: Arrangement,
    rows: Sequence[Summary],
    metric: str,
    width: FigureWidth = "page",
) -> Figure:
    """Differences from the baseline with their 95 % intervals, a panel per condition."""
    by_condition: dict[int, list[tuple[Method, Against]]] = defaultdict(list)
    for group, row in zip(arrangement.groups, rows, strict=False):
        if row.against is not None:
            method = arrangement.methods[group.method]
            by_condition[group.conditions[0]].append((method, row.against))
    most = max(map(len, by_condition.values()))
    alike = len({arrangement.conditions[index].family for index in by_condition}) == 1
    height = 0.8 + 0.3 * most
    figure, panels = _panels(len(by_condition), height, width, sharex=alike, sharey=False)
    factor = 100 if is_share(metric) else 1
    baselines = dict.fromkeys(row.against.baseline for row in rows if row.against)
    for axes, (index, members) in zip(panels, by_condition.items(), strict=True):
        axes.axvline(0, color="black", lw=1)
        for place, (method, against) in enumerate(members):
            found, color = against.difference, method.style.color
            if found.low is not None and found.high is not None:
                axes.plot([factor * found.low, factor * found.high], [place] * 2, color=color)
            axes.plot(factor * found.mean, place, "o", color=color, ms=3)
        names = [literal(method.title) for method, _ in members]
        axes.set_yticks(range(len(members)), names, fontsize="small")
        axes.invert_yaxis()
        axes.set_title(literal(arrangement.conditions[index].title), fontsize="small")
        axes.grid(alpha=0.3, axis="x")
    unit = " in points" if factor == 100 else ""
    than = " or ".join(baselines)
    figure.supxlabel(f"{label_of(metric)} minus {than}{unit}, 95 % interval", fontsize="small")
    return figure


def _panels(
    number: int,
    height: float,
    width: FigureWidth,
    *,
    sharex: bool,
    sharey: bool,
    entries: int = 0,
) -> tuple[Figure, list[Any]]:
    """Panels side by side, as many as the width has room for, with room for a legend above."""
    columns = max(1, min(number, 1 if width == "column" else _COLUMNS))
    own = _INCHES[width] / columns
    legend = 0.16 * math.ceil(entries / legend_columns(_INCHES[width]))
    size, around = (own, min(height, 0.75 * own)), (0.0, 0.25 + legend)
    return panel_grid(number, columns, size, around, sharex=sharex, sharey=sharey)


def _draw_group(axes: Any, runs: Iterable[StoredRun], metric: str, style: LineStyle) -> Any:
    """The line of a group; None where the metric was not taken."""
    curves = [curve for run in runs if len((curve := run.smoothed(metric))[0])]
    rounds = sorted(set.intersection(*(set(at.tolist()) for at, _ in curves))) if curves else []
    if not rounds:
        return None
    values = np.array([values[np.isin(at, rounds)] for at, values in curves])
    mean = values.mean(axis=0)
    (line,) = axes.plot(rounds, mean, color=style.color, linestyle=style.linestyle)
    if 1 < len(curves) < _FEW_SEEDS:
        for one in values:
            axes.plot(rounds, one, color=style.color, linestyle=style.linestyle, lw=0.6, alpha=0.4)
    elif len(curves) > 1:
        spread = values.std(axis=0, ddof=1)
        axes.fill_between(rounds, mean - spread, mean + spread, color=style.color, alpha=0.15, lw=0)
    return line


def class_mix_figure(federation: Federation) -> Figure:
    """The class mix of 30 random clients."""
    figure = new_figure(6, 4.5)
    axes = figure.subplots()
    draw_class_mix(axes, class_counts(federation))
    axes.set_xlabel("class distribution")
    return figure


def draw_class_mix(axes: Any, counts: Indices) -> None:
    """A bar per client, of the shares of its classes; of at most 30 random clients."""
    shown = np.sort(np.random.RandomState(0).permutation(len(counts))[:SHOWN_CLIENTS])
    mix = counts[shown] / counts[shown].sum(axis=1, keepdims=True)
    left = np.zeros(len(shown))
    for label in range(mix.shape[1]):
        axes.barh(
            np.arange(len(shown)),
            mix[:, label],
            left=left,
            height=0.9,
            color=COLORS[label % len(COLORS)],
            hatch=_HATCHES[label // len(COLORS) % len(_HATCHES)],
            edgecolor="white",
            linewidth=0.3,
        )
        left += mix[:, label]
    axes.set_xlim(0, 1)
    axes.set_ylabel("client ID")
    ticks = np.arange(0, len(shown), max(1, len(shown) // 6))
    axes.set_yticks(ticks, [str(shown[tick]) for tick in ticks])
    axes.set_ylim(len(shown) - 0.5, -0.5)
