"""Beyond the paper: does any margin-guided rule beat equal weights with toleration?

The variants come from the recipes ``attention-study-DATASET``. Runs of the same δ and seed share
cohorts, stragglers and batches, so variants are compared pair by pair: the difference from equal
weights, its 95 % interval by Student's t over the pairs, and a two-sided sign test.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from fedproto.report.evidence import Difference, difference, sample_deviation
from fedproto.report.looks import COLORS, new_figure
from fedproto.reproduce.base import EXPERIMENTS, Experiment, Result, Results
from fedproto.reproduce.cases import CLASSIFICATION, FAIR_AND_TOLERANT, Case, Scope
from fedproto.reproduce.curves import final_value, paired
from fedproto.reproduce.library import Request
from fedproto.reproduce.output import Output
from fedproto.reproduce.panels import titled

COLUMNS = (
    "data_set",
    "trained_on",
    "variant",
    "runs",
    "accuracy",
    "std",
    "pairs",
    "difference",
    "low",
    "high",
    "wins",
    "losses",
    "sign_test_p",
)


@EXPERIMENTS.register("study")
class AttentionStudy(Experiment):
    """Sharper and reversed attention against equal weights with toleration, paired by seed."""

    title = "Study: margin-guided attention against equal weights (not in the paper)"
    cases = CLASSIFICATION

    def requests(self, scope: Scope) -> list[Request]:
        """All runs of the study's recipes; at smoke scale two seeds of them."""
        own, enough = scope.seeds is None, 2 if scope.scale == "smoke" else math.inf
        return [
            Request(case.name, config)
            for case in scope.cases(self.cases)
            for config in case.runs(recipe=recipe_of(case), own_seeds=own)
            if not own or config.seed < enough
        ]

    def render(self, scope: Scope, results: Results, output: Output) -> None:
        """A table and a panel per data set."""
        lines: list[tuple[Any, ...]] = []
        shown: list[tuple[Case, dict[str, Difference]]] = []
        for case in scope.cases(self.cases):
            baseline = results.select(case.name, FAIR_AND_TOLERANT)
            differences: dict[str, Difference] = {}
            for label in results.labels(case.name):
                chosen = results.select(case.name, label)
                values = [v for each in chosen if (v := _accuracy(each)) is not None]
                pairs = paired(chosen, baseline, "accuracy", 100)
                pair = difference(pairs) if pairs and label != FAIR_AND_TOLERANT else None
                if pair is not None:
                    differences[label] = pair
                lines.append(_line(case, label, values, pair))
            if differences:
                shown.append((case, differences))
        output.table(self.title, ["data set", *COLUMNS[2:]], _cells(lines))
        output.csv("study", COLUMNS, lines)
        if shown:
            output.figure("study", _draw(shown))


def recipe_of(case: Case) -> str:
    """The name of a data set's recipe of the study."""
    return f"attention-study-{case.name}"


def _accuracy(result: Result) -> float | None:
    return final_value(result.run, "accuracy")


def _line(
    case: Case, label: str, values: Sequence[float], pair: Difference | None
) -> tuple[Any, ...]:
    spread = sample_deviation([100 * value for value in values])
    mean = 100 * float(np.mean(values)) if values else None
    compared = (
        (pair.pairs, pair.mean, pair.low, pair.high, pair.wins, pair.losses, pair.sign_p)
        if pair
        else (None,) * 7
    )
    return (case.title, case.stands_in, label, len(values), mean, spread, *compared)


def _cells(lines: Sequence[tuple[Any, ...]]) -> list[list[list[str]]]:
    def shown(cell: Any) -> str:
        if cell is None:
            return "–"
        return f"{cell:.2f}" if isinstance(cell, float) else str(cell)

    titles = dict.fromkeys((title, used) for title, used, *_ in lines)
    return [
        [
            [title + (f" (on {used})" if used else ""), *(shown(cell) for cell in rest)]
            for first, second, *rest in lines
            if (first, second) == (title, used)
        ]
        for title, used in titles
    ]


def _draw(shown: Sequence[tuple[Case, dict[str, Difference]]]) -> Any:
    figure = new_figure(3.6 * len(shown) + 1.4, 3.2)
    panels = figure.subplots(1, len(shown), squeeze=False, sharey=True)[0]
    labels = list(dict.fromkeys(label for _, found in shown for label in found))
    for axes, (case, found) in zip(panels, shown, strict=True):
        for label, pair in found.items():
            half = None if pair.high is None else pair.high - pair.mean
            axes.errorbar(
                pair.mean, labels.index(label), xerr=half, fmt="o", color=COLORS[0], capsize=3
            )
        axes.axvline(0, color=COLORS[6], lw=1)
        axes.set_yticks(range(len(labels)), labels, fontsize="small")
        axes.set_title(titled(case), fontsize="medium")
        axes.grid(axis="x", alpha=0.3)
    panels[0].set_ylim(len(labels) - 0.5, -0.5)
    figure.supxlabel(
        f"accuracy minus that of '{FAIR_AND_TOLERANT}' (points; 95 % interval over pairs)",
        fontsize="medium",
    )
    return figure
