"""Ours beside the paper's: rows with the difference, as a table, as CSV and as a picture."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fedproto.report.style import COLORS, add_legend, panel_grid
from paper.base import EXPERIMENTS, Experiment, FoundRuns
from paper.cases import Case, Scope
from paper.curves import Averaged
from paper.output import Output
from paper.printed import Printed

COLUMNS = (
    "data_set",
    "trained_on",
    "quantity",
    "row",
    "ours",
    "std_over_deltas",
    "std_over_seeds",
    "runs",
    "paper",
    "paper_std",
    "difference",
    "distance",
)


@dataclass(frozen=True)
class Comparison:
    """A figure of ours beside the paper's.

    Attributes:
        ours: As measured; None where it was not.
        paper: As printed; None where the paper has no such figure.
    """

    case: Case
    quantity: str
    row: str
    ours: Averaged | None
    paper: Printed | None

    @property
    def difference(self) -> float | None:
        """Ours minus the paper's."""
        if self.ours is None or self.paper is None:
            return None
        return self.ours.mean - self.paper.mean

    @property
    def distance(self) -> float | None:
        """The difference in the paper's own spread; None where it prints none, or none but 0."""
        if self.difference is None or self.paper is None or not self.paper.std:
            return None
        return self.difference / self.paper.std

    @property
    def cells(self) -> tuple[Any, ...]:
        """The fields of the CSV file."""
        ours, paper = self.ours, self.paper
        return (
            self.case.title,
            self.case.stands_in,
            self.quantity,
            self.row,
            ours and ours.mean,
            ours and ours.over_deltas,
            ours and ours.over_seeds,
            ours.runs if ours else 0,
            paper and paper.mean,
            paper and paper.std,
            self.difference,
            self.distance,
        )


class ComparisonTable(Experiment):
    """A table of our figures beside the paper's."""

    @abc.abstractmethod
    def rows(self, scope: Scope, results: FoundRuns, output: Output) -> list[Comparison]:
        """Its figures, from the runs that there are."""

    def render(self, scope: Scope, results: FoundRuns, output: Output) -> None:
        """The table, and the same as a picture."""
        rows, name = self.rows(scope, results, output), EXPERIMENTS.name_of(type(self))
        show(output, name, self.title, rows)
        draw(output, name, rows)


def show(output: Output, name: str, title: str, rows: Sequence[Comparison]) -> None:
    """Prints and writes a comparison; one table per quantity."""
    frame = output.csv(name, COLUMNS, [row.cells for row in rows])
    for quantity, group in frame.groupby("quantity", sort=False):
        shown = group.drop(columns="quantity")
        output.table(f"{title}: {quantity}" if quantity else title, shown)


def draw(output: Output, name: str, rows: Sequence[Comparison], columns: int = 4) -> None:
    """A panel per quantity and data set: ours as dots with spread, the paper's as diamonds."""
    keys = list(dict.fromkeys((row.quantity, row.case) for row in rows))
    tallest = max(sum((r.quantity, r.case) == key for r in rows) for key in keys)
    figure, panels = panel_grid(len(keys), columns, (3.4, 0.26 * tallest + 1.1), (0.6, 0.5))
    handles: dict[str, Any] = {}
    for key, axes in zip(keys, panels, strict=True):
        _draw_panel(axes, [row for row in rows if (row.quantity, row.case) == key], handles)
    add_legend(figure, handles)
    output.figure(name, figure)


def _draw_panel(axes: Any, rows: Sequence[Comparison], handles: dict[str, Any]) -> None:
    indices = range(len(rows))
    for index, row in zip(indices, rows, strict=True):
        if row.paper is not None:
            handles["paper (± over δ)"] = axes.errorbar(
                row.paper.mean,
                index + 0.16,
                xerr=row.paper.std,
                fmt="D",
                color=COLORS[1],
                markerfacecolor="white",
                capsize=2,
                markersize=5,
            )
        if row.ours is not None:
            handles["ours (± over δ)"] = axes.errorbar(
                row.ours.mean,
                index - 0.16,
                xerr=row.ours.over_deltas,
                fmt="o",
                color=COLORS[0],
                capsize=2,
                markersize=5,
            )
    axes.set_title(rows[0].case.full_title, fontsize="medium")
    axes.set_yticks(list(indices), [row.row for row in rows], fontsize="small")
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlabel(rows[0].quantity, fontsize="small")
    axes.grid(axis="x", alpha=0.3)
