"""Figures of what was found in one model: reliability, and features in the plane."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedproto.report.looks import COLORS, literal, save_figure

if TYPE_CHECKING:
    from fedproto.analysis.calibration import Bin

# Classes in VOC's colours are told apart by their shape too, whatever the colour vision.
MARKERS = ("o", "s", "^", "D", "v", "P", "X")


def have_matplotlib() -> bool:
    """Whether figures can be drawn."""
    return importlib.util.find_spec("matplotlib") is not None


def draw_reliability(bins: Sequence[Bin], error: float, path: Path) -> Path:
    """Accuracy against confidence, and how many predictions are in each bin."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.4, 5.6), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1])
    filled = [each for each in bins if each.count]
    lows, widths = [each.low for each in filled], [each.high - each.low for each in filled]
    upper.bar(
        lows,
        [each.accuracy for each in filled],
        widths,
        align="edge",
        color=COLORS[0],
        edgecolor="white",
        label="accuracy of a bin",
    )
    upper.plot(
        [each.confidence for each in filled],
        [each.accuracy for each in filled],
        "o",
        color=COLORS[1],
        ms=4,
        clip_on=False,
        label="at its mean confidence",
    )
    upper.plot([0, 1], [0, 1], "--", color="black", lw=1, label="perfectly calibrated")
    upper.set(xlim=(0, 1), ylim=(0, 1), ylabel="accuracy")
    upper.set_title(f"expected calibration error {100 * error:.1f} %", fontsize="medium")
    figure.legend(frameon=False, fontsize="small", loc="outside lower center", ncols=3)
    total = max(1, sum(each.count for each in bins))
    shares = [100 * each.count / total for each in filled]
    lower.bar(lows, shares, widths, align="edge", color=COLORS[5], edgecolor="white")
    lower.set(xlabel="confidence (largest softmax probability)", ylabel="predictions (%)")
    for axes in (upper, lower):
        axes.grid(alpha=0.3)
        axes.set_axisbelow(True)
    return save_figure(figure, path)


def draw_embedding(content: Mapping[str, Any], path: Path) -> Path:
    """Features in the plane, coloured by class, from what an ``embedding.json`` holds."""
    from matplotlib.figure import Figure

    x, y = np.asarray(content["x"]), np.asarray(content["y"])
    classes = np.asarray(content["class"])
    shown = [label for label in range(len(content["classes"])) if (classes == label).any()]
    columns = -(-len(shown) // 20)
    figure = Figure(figsize=(5.4 + 1.3 * columns, 5), layout="constrained")
    axes = figure.subplots()
    for label in shown:
        inside = classes == label
        axes.scatter(
            x[inside],
            y[inside],
            s=12,
            marker=MARKERS[label % len(MARKERS)],
            color=content["colors"][label],
            label=literal(content["classes"][label]),
            linewidths=0,
        )
    axes.set(xticks=[], yticks=[], aspect="equal")
    axes.set_title(f"t-SNE of {len(x)} held-out features", fontsize="medium")
    figure.legend(
        loc="outside right upper",
        ncols=columns,
        frameon=False,
        fontsize="small",
        markerscale=2,
        title="class",
    )
    return save_figure(figure, path)
