"""Ours beside the paper's: rows with the difference, as a table, as CSV and as a picture."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fedproto.report.looks import COLORS, add_legend, panel_grid
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
    digits: int = 1

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
    seeds = any(row.ours is not None and row.ours.over_seeds is not None for row in rows)
    columns = ["data set", "", "ours", *(["± seeds"] if seeds else []), "paper", "ours − paper"]
    columns.append("in its ±")
    for quantity in dict.fromkeys(row.quantity for row in rows):
        chosen = [row for row in rows if row.quantity == quantity]
        groups = [
            [_line(row, seeds) for row in chosen if row.case == case]
            for case in dict.fromkeys(row.case for row in chosen)
        ]
        output.table(f"{title}: {quantity}" if quantity else title, columns, groups)
    output.csv(name, COLUMNS, [row.cells for row in rows])


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


def _line(row: Comparison, seeds: bool) -> list[str]:
    digits, ours = row.digits, row.ours
    difference = row.difference
    return [
        row.case.full_title,
        row.row,
        "–" if ours is None else _shown(ours.mean, ours.over_deltas, digits),
        *([_shown(ours.over_seeds if ours else None, None, digits)] if seeds else []),
        "–" if row.paper is None else _shown(row.paper.mean, row.paper.std, digits),
        "–" if difference is None else f"{difference:+.{digits}f}",
        "–" if row.distance is None else f"{row.distance:+.1f}",
    ]


def _shown(mean: float | None, std: float | None, digits: int) -> str:
    if mean is None:
        return "–"
    return f"{mean:.{digits}f}" + ("" if std is None else f" ± {std:.{digits}f}")
