"""Methods compared seed by seed: tables of scores and differences, and a figure of them.

Runs of the same data, δ and seed share cohorts, stragglers and batches, so methods are compared
pair by pair, by their final scores and by their means over all rounds: the mean difference, its
95 % interval by Student's t, and p-values corrected by Holm for all comparisons with the same
method by the same quantity, or of the part of a study that they belong to.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import numpy as np

from fedproto.report.evidence import Difference, holm, sample_deviation
from fedproto.report.looks import COLORS, new_figure
from fedproto.report.results import main_score
from fedproto.report.summary import differences, figures_of
from fedproto.reproduce.base import FoundRun
from fedproto.reproduce.cases import FAIR_AND_TOLERANT, Case
from fedproto.reproduce.library import concentration
from fedproto.reproduce.output import Output
from fedproto.reproduce.panels import titled

WHICH = ("data_set", "trained_on", "alpha", "delta", "method")
ALONE = (
    *WHICH,
    "runs",
    "score",
    "std",
    "area",
    "reached_target",
    "rounds_to_target",
    "megabytes_up_a_round",
    "megabytes_down_a_round",
    "seconds_a_round",
)
PAIRED = (
    *WHICH,
    "minus",
    "quantity",
    "pairs",
    "difference",
    "low",
    "high",
    "corrected_p",
    "wins",
    "losses",
)
FINAL, AREA = "final", "mean over rounds"
"""What methods are compared by: the score in the end, and the area under its curve."""


@dataclass(frozen=True)
class Row:
    """A method on a data set, at one class mix and share of stragglers.

    Attributes:
        by_seed: What it is compared by, of each seed, in points.
    """

    case: Case
    setting: tuple[float | None, float]
    label: str
    by_seed: Mapping[str, Mapping[int, float]]
    figures: Mapping[str, float]

    @property
    def setting_in_words(self) -> str:
        """Such as ``α = 0.1, δ = 0.5``."""
        known = zip("αδ", self.setting, strict=True)
        return ", ".join(f"{name} = {value:g}" for name, value in known if value is not None)

    @property
    def which(self) -> tuple[Any, ...]:
        """The cells that name it."""
        return self.case.title, self.case.stands_in, *self.setting, self.label

    def minus(self, other: Row | None, quantity: str) -> Difference | None:
        """A quantity of it minus another's, over the seeds that both have."""
        if other is None or other.label == self.label:
            return None
        return differences(self.by_seed[quantity], other.by_seed[quantity])


@dataclass(frozen=True)
class Pair:
    """How far a row is ahead of another method on the same data, and the p-value corrected."""

    row: Row
    minus: str
    quantity: str
    found: Difference
    p: float | None

    @property
    def cells(self) -> tuple[Any, ...]:
        """A line of the table of pairs."""
        one = self.found
        numbers = one.pairs, one.mean, one.low, one.high, self.p, one.wins, one.losses
        return *self.row.which, self.minus, self.quantity, *numbers

    def shown(self, sign: int = 1) -> tuple[str, str]:
        """The difference with its interval, seen from the row or (−1) from the other, and p."""
        ends = [] if self.found.low is None else [self.found.low, self.found.high]
        low_to_high = sorted(sign * end for end in ends if end is not None)
        around = f" [{', '.join(f'{end:+.2f}' for end in low_to_high)}]" if low_to_high else ""
        return f"{sign * self.found.mean:+.2f}{around}", _shown(self.p, 4)


def rows_of(case: Case, results: Sequence[FoundRun]) -> list[Row]:
    """A row per method, class mix and share of stragglers, in the order of the runs."""
    groups: dict[tuple[tuple[float | None, float], str], list[FoundRun]] = {}
    for result in results:
        mix = concentration(result.request.config)
        groups.setdefault(((mix, result.delta), result.label), []).append(result)
    rows: list[Row] = []
    for (setting, label), group in groups.items():
        metric = main_score(result.run for result in group)
        fair = groups.get((setting, FAIR_AND_TOLERANT), [])
        ends = [end for result in fair if (end := result.run.final(metric)) is not None]
        target = float(np.mean(ends)) if ends else None
        found = {result.seed: figures_of(result.run, metric, target) for result in group}
        found = {seed: figures for seed, figures in found.items() if metric in figures}
        if found:
            names = dict.fromkeys(name for one in found.values() for name in one)
            figures = {
                name: float(np.mean([one[name] for one in found.values() if name in one]))
                for name in names
            }
            figures["reached"] = sum("rounds to target" in one for one in found.values())
            figures["rounds"] = float(np.mean([len(result.run.records) for result in group]))
            by_seed = {
                quantity: {seed: 100 * one[name] for seed, one in found.items()}
                for quantity, name in ((FINAL, metric), (AREA, AREA))
            }
            rows.append(Row(case, setting, label, by_seed, figures))
    return rows


def show_pairs(
    output: Output,
    name: str,
    title: str,
    found: Sequence[tuple[Case, Sequence[FoundRun]]],
    subjects: Sequence[str] = (),
    part_of: Callable[[Row], Hashable] = lambda _: None,
) -> None:
    """Every method beside fairness + toleration, and beside the `subjects` that a study is about.

    p-values are corrected within each part of a study, so that one made with few seeds to look
    around does not drown the comparison that decides.
    """
    rows = [row for case, results in found for row in rows_of(case, results)]
    if not rows:
        return
    known = {(row.case.name, row.setting, row.label): row for row in rows}
    pairs = [
        pair
        for other in (FAIR_AND_TOLERANT, *subjects)
        for quantity in (FINAL, AREA)
        for part in dict.fromkeys(part_of(row) for row in rows)
        for pair in _corrected(
            [
                (row, row.minus(known.get((row.case.name, row.setting, other)), quantity))
                for row in rows
                if part_of(row) == part
            ],
            other,
            quantity,
        )
    ]
    output.csv(name, ALONE, [_about(row) for row in rows])
    output.csv(f"{name}-pairs", PAIRED, [pair.cells for pair in pairs])
    _print(output, title, rows, pairs, subjects)
    output.figure(name, _draw(rows, subjects[0] if subjects else None))


def _corrected(
    compared: Sequence[tuple[Row, Difference | None]], other: str, quantity: str
) -> list[Pair]:
    """Pairs with p-values corrected for how many there are."""
    found = [(row, pair) for row, pair in compared if pair is not None]
    corrected = holm([pair.p for _, pair in found])
    return [
        Pair(row, other, quantity, pair, p) for (row, pair), p in zip(found, corrected, strict=True)
    ]


def _print(
    output: Output, title: str, rows: Sequence[Row], pairs: Sequence[Pair], subjects: Sequence[str]
) -> None:
    """Scores beside fairness + toleration, a table for each subject, and what it all costs."""
    known = {(pair.row.which, pair.minus, pair.quantity): pair for pair in pairs}

    def beside(row: Row, other: str, sign: int = 1) -> list[str]:
        found = [known.get((row.which, other, quantity)) for quantity in (FINAL, AREA)]
        return [cell for pair in found for cell in (pair.shown(sign) if pair else ("–", "–"))]

    def table(heading: str, columns: Sequence[str], cells: Callable[[Row], list[str]]) -> None:
        shown: dict[str, list[list[str]]] = {}
        for row in rows:
            about = [row.case.full_title, row.setting_in_words, row.label]
            shown.setdefault(row.case.name, []).append([*about, *cells(row)])
        output.table(heading, ["data set", "", "method", *columns], shown.values())

    def in_the_end(row: Row) -> list[str]:
        runs, score, std, *_ = _about(row)[len(WHICH) :]
        deviation = "" if std is None else f" ± {std:.2f}"
        return [str(runs), _shown(score, 2) + deviation, *beside(row, FAIR_AND_TOLERANT)[:2]]

    def on_the_way(row: Row) -> list[str]:
        runs, _, _, area, reached, to_target, *costs = _about(row)[len(WHICH) :]
        in_time = f"{_shown(to_target, 0)} ({reached} of {runs})"
        _, _, ahead, _ = beside(row, FAIR_AND_TOLERANT)
        return [_shown(area, 2), ahead, in_time, *(_shown(cost, 2) for cost in costs)]

    against = "from fair + tolerant"
    table(title, ["runs", "score", against, "p"], in_the_end)
    for subject in subjects:
        ahead = partial(beside, other=subject, sign=-1)
        table(f"{subject} ahead by", ["in the end", "p", AREA, "p"], ahead)
    costs = ["to target", "MB up", "MB down", "s a round"]
    table("On the way, and at what cost", ["mean", against, *costs], on_the_way)


def _about(row: Row) -> tuple[Any, ...]:
    """The cells of a method by itself."""
    figures, rounds = row.figures, row.figures["rounds"]
    scores, areas = (list(row.by_seed[quantity].values()) for quantity in (FINAL, AREA))
    return (
        *row.which,
        len(scores),
        float(np.mean(scores)),
        sample_deviation(scores),
        float(np.mean(areas)),
        int(figures["reached"]),
        figures.get("rounds to target"),
        figures["bytes up"] / rounds / 1e6,
        figures["bytes down"] / rounds / 1e6,
        figures["seconds"] / rounds,
    )


def _shown(number: float | None, digits: int) -> str:
    return "–" if number is None else f"{number:.{digits}f}"


def _draw(rows: Sequence[Row], subject: str | None) -> Any:
    """Differences, a panel per data set, a marker per class mix and share of stragglers.

    Of the subject from every method where there is one, of every method from fairness + toleration
    otherwise; a colour for the score in the end, another for the mean over rounds.
    """
    other = subject or FAIR_AND_TOLERANT
    cases = list(dict.fromkeys(row.case for row in rows))
    labels = list(dict.fromkeys(row.label for row in rows if row.label != other))
    settings = list(dict.fromkeys(row.setting for row in rows))
    figure = new_figure(2.6 * len(cases) + 2.2, 0.26 * len(labels) + 1.3)
    panels = figure.subplots(1, len(cases), squeeze=False, sharey=True)[0]
    known = {(row.case, row.setting, row.label): row for row in rows}
    marks = list(product((FINAL, AREA), settings))
    for ((case, setting, label), row), quantity in product(known.items(), (FINAL, AREA)):
        against = known.get((case, setting, other))
        pair = against and (
            against.minus(row, quantity) if subject else row.minus(against, quantity)
        )
        if not pair:
            continue
        panels[cases.index(case)].errorbar(
            pair.mean,
            labels.index(label) + 0.6 * marks.index((quantity, setting)) / len(marks) - 0.25,
            xerr=None if pair.high is None else pair.high - pair.mean,
            fmt="os^Dv<>"[settings.index(setting) % 7],
            color=COLORS[(FINAL, AREA).index(quantity)],
            markersize=3,
            capsize=2,
            label=f"{row.setting_in_words}, {quantity}",
        )
    for axes, case in zip(panels, cases, strict=True):
        axes.axvline(0, color=COLORS[6], lw=1)
        axes.set_yticks(range(len(labels)), labels, fontsize="small")
        axes.set_title(titled(case), fontsize="medium")
        axes.grid(axis="x", alpha=0.3)
        handles = dict(zip(*axes.get_legend_handles_labels()[::-1], strict=True))
        if len(handles) > 1:
            axes.legend(handles.values(), handles, fontsize="x-small")
    panels[0].set_ylim(len(labels) - 0.5, -0.5)
    what = f"{subject} minus the method's" if subject else f"the method minus that of '{other}'"
    figure.supxlabel(f"score of {what} (points; 95 % interval over seeds)", fontsize="medium")
    return figure
