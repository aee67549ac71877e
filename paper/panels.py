"""Figures whose panels are curves over nominal rounds, one line per method."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from fedproto.report.style import add_legend, line_styles, new_figure
from paper.base import FoundRun, FoundRuns
from paper.cases import CENTRALIZED, FAIR_AND_TOLERANT, Case
from paper.curves import band
from paper.output import Output

# A method has the same line in every figure.
METHODS = ("FedAvg", "FedProto", "FedProx", "FedAtt", FAIR_AND_TOLERANT, CENTRALIZED)
STYLES = ("-", "--", "-.", ":")
COLUMNS = ("data_set", "trained_on", "metric", "panel", "method", "round", "mean", "std", "runs")


@dataclass(frozen=True)
class Panel:
    """A panel of curves.

    Attributes:
        factor: From the records' unit to that of the label.
        key: What tells panels of one data set apart in the CSV file.
    """

    case: Case
    metric: str
    title: str
    ylabel: str
    lines: Mapping[str, Sequence[FoundRun]]
    factor: float = 1.0
    log: bool = False
    key: str = ""

    def bands(self) -> dict[str, pd.DataFrame]:
        """The curve of every method that has one."""
        return {
            label: curve
            for label, results in self.lines.items()
            if (curve := band(results, self.metric, self.factor)) is not None
        }


def methods_of(results: FoundRuns, case: str) -> dict[str, Sequence[FoundRun]]:
    """The runs of a data set by method."""
    return {label: results.select(case, label) for label in results.labels(case)}


def show_panels(output: Output, name: str, rows: Sequence[Sequence[Panel]]) -> None:
    """Draws rows of panels, and writes all curves."""
    curves: list[pd.DataFrame] = []
    most = max(len(row) for row in rows)
    figure = new_figure(3.0 * most + 0.4, 2.4 * len(rows) + 0.5 + 1.2 / most)
    grid = figure.subplots(len(rows), most, squeeze=False, sharex="col")
    handles: dict[str, Any] = {}
    shown = [label for row in rows for panel in row for label in panel.lines]
    styles = {label: line_of(label, shown) for label in shown}
    for row, cells in zip(rows, grid, strict=True):
        for axes in cells[len(row) :]:
            axes.set_visible(False)
        for panel, axes in zip(row, cells, strict=False):
            bands = panel.bands()
            handles |= _draw(axes, panel, bands, styles)
            about = {
                "data_set": panel.case.title,
                "trained_on": panel.case.stands_in,
                "metric": panel.metric,
                "panel": panel.key,
            }
            curves += [curve.assign(**about, method=label) for label, curve in bands.items()]
    known = [label for label in METHODS if label in handles]
    known += [label for label in handles if label not in known]
    add_legend(figure, {label: handles[label] for label in known})
    output.csv(name, COLUMNS, pd.concat(curves) if curves else ())
    output.figure(name, figure)


def line_of(label: str, beside: Iterable[str] = ()) -> dict[str, Any]:
    """Colour and dashes of a method; on paper dashes tell even the well-known ones apart.

    Methods that are not the paper's are told apart from those they are shown `beside`.
    """
    known = list(dict.fromkeys((*METHODS, *beside, label)))
    position = known.index(label)
    look = line_styles(known)[position]
    # where colours come round again, dashes shift
    style = STYLES[(position + look.dash) % len(STYLES)] if label != CENTRALIZED else (0, (1, 1))
    return {"color": look.color, "linestyle": style}


def _draw(
    axes: Any, panel: Panel, bands: dict[str, pd.DataFrame], styles: dict[str, dict[str, Any]]
) -> dict[str, Any]:
    """Draws a panel; returns its lines by label."""
    handles: dict[str, Any] = {}
    for label, curve in bands.items():
        look, mean, std = styles[label], curve["mean"], curve["std"]
        (handles[label],) = axes.plot(curve["round"], mean, **look)
        if curve["runs"].iloc[0] > 1:
            axes.fill_between(
                curve["round"], mean - std, mean + std, color=look["color"], alpha=0.12, lw=0
            )
    if not bands:
        axes.text(0.5, 0.5, "not measured", ha="center", va="center", transform=axes.transAxes)
    elif panel.log:
        axes.set_yscale("log")
    axes.set_title(panel.title, fontsize="medium")
    axes.set_xlabel("round")
    axes.tick_params(labelbottom=True)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_ylabel(panel.ylabel)
    axes.grid(alpha=0.3)
    return handles
