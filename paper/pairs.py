"""Methods compared seed by seed: tables of scores and differences, and a figure of them.

Runs of the same data, δ and seed share cohorts, stragglers and batches, so methods are compared
pair by pair, by their final scores and by their means over all rounds: the mean difference, its
95 % interval by Student's t, and p-values corrected by Holm for all comparisons with the same
method by the same quantity, or of the part of a study that they belong to.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from itertools import product
from typing import Any

import numpy as np
import pandas as pd

from fedproto.report.results import main_score
from fedproto.report.statistics import Difference, difference, holm
from fedproto.report.style import COLORS, new_figure
from fedproto.report.summary import figures_of
from paper.base import FoundRun
from paper.cases import FAIR_AND_TOLERANT, Case
from paper.library import concentration
from paper.output import Output

WHICH = ("data_set", "trained_on", "alpha", "delta", "method")
ALONE = (
    *WHICH,
    "runs",
    "score",
    "std",
    "mean_over_rounds",
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
FINAL, OVER_ROUNDS = "final", "mean over rounds"
"""What methods are compared by: the score at the end, and its mean over all rounds."""
TARGET = "rounds to target"


def show_pairs(
    output: Output,
    name: str,
    title: str,
    found: Sequence[tuple[Case, Sequence[FoundRun]]],
    subjects: Sequence[str] = (),
    part_of: Callable[[Case, str], Hashable] = lambda *_: None,
) -> None:
    """Every method beside fairness + toleration, and beside the `subjects` that a study is about.

    p-values are corrected within each part of a study, so that one made with few seeds to look
    around does not drown the comparison that decides.
    """
    runs = pd.DataFrame(
        [row for case, results in found for row in _figures(case, results, part_of)]
    )
    if runs.empty:
        return
    # Two recipes may ask for the same run.
    runs = runs.drop_duplicates([*WHICH, "seed"])
    alone = output.csv(name, ALONE, _alone(runs))
    scores = ["runs", "score", "std", "mean_over_rounds"]
    output.table(title, alone[[*WHICH, *scores]])
    output.table("Rounds to the target, and costs", alone.drop(columns=scores))
    paired = _paired(runs, (FAIR_AND_TOLERANT, *subjects))
    pairs = output.csv(f"{name}-pairs", PAIRED, paired)
    for other, chosen in pairs.groupby("minus", sort=False):
        output.table(f"Difference from {other}", chosen.drop(columns="minus"))
    output.figure(name, _draw(alone, pairs, subjects[0] if subjects else None))


def _figures(
    case: Case, results: Sequence[FoundRun], part_of: Callable[[Case, str], Hashable]
) -> list[dict[str, Any]]:
    """A row per run, in points; the target is where fairness + toleration ends on average."""
    groups: dict[tuple[Any, ...], list[FoundRun]] = defaultdict(list)
    for result in results:
        alpha = concentration(result.request.config)
        groups["" if alpha is None else alpha, result.delta, result.label].append(result)
    rows = []
    for (alpha, delta, label), group in groups.items():
        metric = main_score(result.run for result in group)
        fair = groups.get((alpha, delta, FAIR_AND_TOLERANT), [])
        ends = [end for result in fair if (end := result.run.final(metric)) is not None]
        target = float(np.mean(ends)) if ends else None
        which = (case.title, case.stands_in, alpha, delta, label)
        for result in group:
            figures = figures_of(result.run, metric, target)
            if metric in figures:
                rows.append(
                    dict(zip(WHICH, which, strict=True))
                    | {"seed": result.seed, "part": part_of(case, label), TARGET: None}
                    | figures
                    | {"rounds": len(result.run.records)}
                    | {FINAL: 100 * figures[metric], OVER_ROUNDS: 100 * figures[OVER_ROUNDS]}
                )
    return rows


def _alone(runs: pd.DataFrame) -> pd.DataFrame:
    """Every method by itself: means over seeds, and what it costs."""
    groups = runs.astype({TARGET: float}).groupby(list(WHICH), sort=False)
    numbers = [FINAL, OVER_ROUNDS, TARGET, "bytes up", "bytes down", "seconds", "rounds"]
    # NumPy's own mean, as in all other tables: groupby's differs in the last digit.
    mean = groups[numbers].agg(lambda column: column.mean())
    return pd.DataFrame(
        {
            "runs": groups.size(),
            "score": mean[FINAL],
            "std": groups[FINAL].agg(lambda column: column.std()),
            "mean_over_rounds": mean[OVER_ROUNDS],
            "reached_target": groups[TARGET].count(),
            "rounds_to_target": mean[TARGET],
            "megabytes_up_a_round": mean["bytes up"] / mean["rounds"] / 1e6,
            "megabytes_down_a_round": mean["bytes down"] / mean["rounds"] / 1e6,
            "seconds_a_round": mean["seconds"] / mean["rounds"],
        }
    ).reset_index()


def _differences(ours: Mapping[int, float], theirs: Mapping[int, float]) -> Difference | None:
    """Of the seeds that both have; None if they share none."""
    shared = [ours[seed] - theirs[seed] for seed in ours if seed in theirs]
    return difference(shared) if shared else None


def _paired(runs: pd.DataFrame, others: Sequence[str]) -> list[tuple[Any, ...]]:
    """Every method minus each of the others, over the seeds that both have."""
    methods = {which: own.set_index("seed") for which, own in runs.groupby(list(WHICH), sort=False)}
    lines: list[tuple[Any, ...]] = []
    for other, quantity, part in product(others, (FINAL, OVER_ROUNDS), runs["part"].unique()):
        found = [
            (which, apart)
            for which, own in methods.items()
            if which[-1] != other
            and own["part"].iloc[0] == part
            and (than := methods.get((*which[:-1], other))) is not None
            and (apart := _differences(own[quantity].to_dict(), than[quantity].to_dict()))
        ]
        corrected = holm([one.p for _, one in found])
        lines += [
            (*which, other, quantity, one.pairs, one.mean, one.low, one.high, p, one.wins,
             one.losses)
            for (which, one), p in zip(found, corrected, strict=True)
        ]  # fmt: skip
    return lines


def _draw(alone: pd.DataFrame, pairs: pd.DataFrame, subject: str | None) -> Any:
    """Differences, a panel per data set, a marker per class mix and share of stragglers.

    Of the subject from every method where there is one, of every method from fairness + toleration
    otherwise; a colour for the score in the end, another for the mean over rounds.
    """
    other, sign = subject or FAIR_AND_TOLERANT, -1 if subject else 1
    labels = [label for label in alone["method"].unique() if label != other]
    settings = list(dict.fromkeys(zip(alone["alpha"], alone["delta"], strict=True)))
    marks = list(product((FINAL, OVER_ROUNDS), settings))
    cases = alone.groupby(["data_set", "trained_on"], sort=False).groups
    figure = new_figure(2.6 * len(cases) + 2.2, 0.26 * len(labels) + 1.3)
    panels = figure.subplots(1, len(cases), squeeze=False, sharey=True)[0]
    for axes, (case, used) in zip(panels, cases, strict=True):
        for row in pairs[(pairs["data_set"] == case) & (pairs["minus"] == other)].itertuples():
            setting = (row.alpha, row.delta)
            words = ", ".join(
                f"{name} = {value:g}"
                for name, value in zip("αδ", setting, strict=True)
                if value != ""
            )
            axes.errorbar(
                sign * row.difference,
                labels.index(row.method)
                + 0.6 * marks.index((row.quantity, setting)) / len(marks)
                - 0.25,
                xerr=None if row.high is None else row.high - row.difference,
                fmt="os^Dv<>"[settings.index(setting) % 7],
                color=COLORS[(FINAL, OVER_ROUNDS).index(row.quantity)],
                markersize=3,
                capsize=2,
                label=f"{words}, {row.quantity}",
            )
        axes.axvline(0, color=COLORS[6], lw=1)
        axes.set_yticks(range(len(labels)), labels, fontsize="small")
        axes.set_title(case + (f"\n(on {used})" if used else ""), fontsize="medium")
        axes.grid(axis="x", alpha=0.3)
        handles = dict(zip(*axes.get_legend_handles_labels()[::-1], strict=True))
        if len(handles) > 1:
            axes.legend(handles.values(), handles, fontsize="x-small")
    panels[0].set_ylim(len(labels) - 0.5, -0.5)
    what = f"{subject} minus the method's" if subject else f"the method minus that of '{other}'"
    figure.supxlabel(f"score of {what} (points; 95 % interval over seeds)", fontsize="medium")
    return figure
