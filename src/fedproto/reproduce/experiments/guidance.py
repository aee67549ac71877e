"""Beyond the paper: does guidance by classes beat equal weights with toleration, and the field?

The recipes ``guidance-DATASET`` are the deciding comparison, ``guidance-field-DATASET`` the other
opponents and every ingredient by itself; ``guidance-grid`` is what their parameters were chosen
from. Runs of the same data, δ and seed share cohorts, stragglers and batches, so methods are
compared pair by pair, and p-values are corrected for all comparisons of a table.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fedproto.config import RunConfig
from fedproto.report.evidence import Difference, holm, sample_deviation
from fedproto.report.looks import COLORS, new_figure
from fedproto.report.results import main_score
from fedproto.report.summary import differences, figures_of
from fedproto.reproduce.base import EXPERIMENTS, Experiment, Result, Results
from fedproto.reproduce.cases import CLASSIFICATION, FAIR_AND_TOLERANT, Case, Scope
from fedproto.reproduce.forgetting import GUIDED, MEASURE, show_forgetting
from fedproto.reproduce.library import Request
from fedproto.reproduce.output import Output
from fedproto.reproduce.panels import titled

SEGMENTED = "fpascal"
DELTA = 0.5
"""The share of stragglers at which all methods are compared."""

AGAINST = ("pairs", "difference", "low", "high", "corrected_p", "wins", "losses")
COLUMNS = (
    "data_set",
    "trained_on",
    "alpha",
    "delta",
    "method",
    "runs",
    "score",
    "std",
    "area",
    "rounds_to_target",
    "megabytes_up_a_round",
    "megabytes_down_a_round",
    "seconds_a_round",
    *(f"{column}_from_fair" for column in AGAINST),
    *(f"{column}_of_guided" for column in AGAINST),
)


@dataclass(frozen=True)
class Row:
    """A method on a data set, at one class mix and share of stragglers.

    Attributes:
        case: The data set.
        setting: The class mix, where the data are shared out by one, and the share of stragglers.
        label: The method.
        scores: The final score by seed, in points.
        figures: Means over seeds of what a table says of a run.
    """

    case: Case
    setting: tuple[float | None, float]
    label: str
    scores: Mapping[int, float]
    figures: Mapping[str, float]

    def minus(self, other: Row | None) -> Difference | None:
        """Its score minus another's, over the seeds that both have."""
        if other is None or other.label == self.label:
            return None
        return differences(self.scores, other.scores)


@EXPERIMENTS.register("guidance")
class GuidanceStudy(Experiment):
    """Guidance by classes against equal weights with toleration, and the field's methods."""

    title = "Study: guidance by classes (not in the paper)"
    cases = (*CLASSIFICATION, SEGMENTED)

    def requests(self, scope: Scope) -> list[Request]:
        """All runs of the recipes; at smoke scale a few of them."""
        return [
            _looked_into(Request(case.name, config))
            for case in scope.cases(self.cases)
            for recipe in ("guidance", *(["guidance-field"] if case.name != SEGMENTED else []))
            for config in case.runs(recipe=f"{recipe}-{case.name}", own_seeds=scope.seeds is None)
            if scope.scale != "smoke" or _is_little(case, recipe, config)
        ]

    def render(self, scope: Scope, results: Results, output: Output) -> None:
        """The table of differences, their figure, and what becomes of classes."""
        cases = scope.cases(self.cases)
        rows = [row for case in cases for row in _rows(results.select(case.name), case)]
        if rows:
            _show(output, self.title, rows)
            output.figure("guidance", _draw(rows))
        show_forgetting(output, [(case, results.select(case.name)) for case in cases])


def _is_little(case: Case, recipe: str, config: RunConfig) -> bool:
    """Whether a run is among those of the smoke scale."""
    if case.name == SEGMENTED:
        return getattr(config.data, "alpha", None) == 0.1 and config.seed == 0
    field = recipe == "guidance-field"
    few = config.seed == 0 and case.name == "mnist" if field else config.seed < 2
    return few and config.schedule.delta == DELTA


def _looked_into(request: Request) -> Request:
    """The runs that are shown class by class are looked into after every round."""
    config = request.config
    if (
        config.title not in (GUIDED, FAIR_AND_TOLERANT)
        or (config.seed, config.schedule.delta) != (0, DELTA)
        or request.case == SEGMENTED
    ):
        return request
    measured = replace(config, measure=replace(config.measure, every=1, what=(MEASURE,)))
    return replace(request, config=measured, wishes=frozenset({MEASURE}))


def _rows(results: Sequence[Result], case: Case) -> list[Row]:
    """A row per method, class mix and share of stragglers, in the order of the runs."""
    groups: dict[tuple[tuple[float | None, float], str], list[Result]] = {}
    for result in results:
        groups.setdefault(((result.alpha, result.delta), result.label), []).append(result)
    rows: list[Row] = []
    for (setting, label), group in groups.items():
        metric = main_score(result.run for result in group)
        fair = groups.get((setting, FAIR_AND_TOLERANT), [])
        ends = [end for result in fair if (end := result.run.final(metric)) is not None]
        target = float(np.mean(ends)) if ends else None
        found = {result.seed: figures_of(result.run, metric, target) for result in group}
        found = {seed: figures for seed, figures in found.items() if metric in figures}
        if found:
            figures = {
                name: float(np.mean([one[name] for one in found.values()]))
                for name in dict.fromkeys(name for one in found.values() for name in one)
                if all(name in one for one in found.values())
            }
            rounds = float(np.mean([len(result.run.records) for result in group]))
            scores = {seed: 100 * one[metric] for seed, one in found.items()}
            rows.append(Row(case, setting, label, scores, figures | {"rounds": rounds}))
    return rows


def _show(output: Output, title: str, rows: Sequence[Row]) -> None:
    """Every method beside fairness + toleration and beside Guided."""
    known = {(row.case.name, row.setting, row.label): row for row in rows}

    def beside(row: Row, label: str) -> Row | None:
        return known.get((row.case.name, row.setting, label))

    from_fair = [row.minus(beside(row, FAIR_AND_TOLERANT)) for row in rows]
    of_guided = [
        guided.minus(row) if (guided := beside(row, GUIDED)) is not None else None for row in rows
    ]
    compared = [_compared(pairs) for pairs in (from_fair, of_guided)]
    lines = [
        (*_about(row), *first, *second) for row, first, second in zip(rows, *compared, strict=True)
    ]
    output.csv("guidance", COLUMNS, lines)
    columns = ["data set", "α", "δ", "method", "runs", "score", "area", "rounds to", "MB a round"]
    columns += ["from fair + tolerant", "p", "Guided ahead by", "p"]
    shown: dict[str, list[list[str]]] = {}
    for row, first, second in zip(rows, *compared, strict=True):
        figures = _about(row)
        shown.setdefault(row.case.name, []).append(
            [
                row.case.title + (f" (on {row.case.stands_in})" if row.case.stands_in else ""),
                *(_shown(cell, 2) for cell in row.setting),
                row.label,
                str(figures[5]),
                _shown(figures[6], 2) + ("" if figures[7] is None else f" ± {figures[7]:.2f}"),
                _shown(figures[8], 2),
                _shown(figures[9], 0),
                _shown(None if figures[10] is None else figures[10] + figures[11], 2),
                *_interval(first),
                *_interval(second),
            ]
        )
    output.table(title, columns, shown.values())


def _compared(pairs: Sequence[Difference | None]) -> list[tuple[Any, ...]]:
    """Cells of differences, with p-values corrected for how many there are."""
    corrected = holm([None if pair is None else pair.p for pair in pairs])
    return [
        (None,) * len(AGAINST)
        if pair is None
        else (pair.pairs, pair.mean, pair.low, pair.high, p, pair.wins, pair.losses)
        for pair, p in zip(pairs, corrected, strict=True)
    ]


def _about(row: Row) -> tuple[Any, ...]:
    """The cells of a method by itself."""
    scores, figures, rounds = list(row.scores.values()), row.figures, row.figures["rounds"]
    area = figures.get("area")
    return (
        row.case.title,
        row.case.stands_in,
        *row.setting,
        row.label,
        len(scores),
        float(np.mean(scores)),
        sample_deviation(scores),
        None if area is None else 100 * area,
        figures.get("rounds to target"),
        figures["bytes up"] / rounds / 1e6,
        figures["bytes down"] / rounds / 1e6,
        figures["seconds"] / rounds,
    )


def _shown(number: float | None, digits: int) -> str:
    return "–" if number is None else f"{number:.{digits}f}"


def _interval(cells: tuple[Any, ...]) -> tuple[str, str]:
    _, mean, low, high, p, _, _ = cells
    if mean is None:
        return "–", "–"
    around = "" if low is None else f" [{low:+.2f}, {high:+.2f}]"
    return f"{mean:+.2f}{around}", _shown(p, 4)


def _draw(rows: Sequence[Row]) -> Any:
    """By how much Guided is ahead of each method, a panel per data set; δ by marker."""
    cases = list(dict.fromkeys(row.case for row in rows))
    labels = list(dict.fromkeys(row.label for row in rows if row.label != GUIDED))
    settings = list(dict.fromkeys(row.setting for row in rows))
    figure = new_figure(2.6 * len(cases) + 2.2, 0.26 * len(labels) + 1.3)
    panels = figure.subplots(1, len(cases), squeeze=False, sharey=True)[0]
    known = {(row.case, row.setting, row.label): row for row in rows}
    for (case, setting, label), row in known.items():
        guided = known.get((case, setting, GUIDED))
        pair = guided and guided.minus(row)
        if not pair:
            continue
        place = settings.index(setting)
        panels[cases.index(case)].errorbar(
            pair.mean,
            labels.index(label) + 0.12 * place,
            xerr=None if pair.high is None else pair.high - pair.mean,
            fmt="os^Dv<>"[place % 7],
            color=COLORS[place % len(COLORS)],
            markersize=4,
            capsize=2,
            label=", ".join(
                f"{name} = {value:g}"
                for name, value in zip("αδ", setting, strict=True)
                if value is not None
            ),
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
    figure.supxlabel(f"score of {GUIDED} minus the method's (points; 95 % interval over seeds)")
    return figure
