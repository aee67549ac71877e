"""Methods compared seed by seed: a table of differences and a figure of them.

Runs of the same data, δ and seed share cohorts, stragglers and batches, so methods are compared
pair by pair: the mean difference, its 95 % interval by Student's t, and p-values corrected by Holm
for all comparisons of the table, or of the part of a study that they belong to.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
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

ALONE = (
    "data_set",
    "trained_on",
    "alpha",
    "delta",
    "method",
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
AGAINST = ("pairs", "difference", "low", "high", "corrected_p", "wins", "losses")


@dataclass(frozen=True)
class Row:
    """A method on a data set, at one class mix and share of stragglers.

    Attributes:
        scores: The final score by seed, in points.
    """

    case: Case
    setting: tuple[float | None, float]
    label: str
    scores: Mapping[int, float]
    figures: Mapping[str, float]

    @property
    def setting_in_words(self) -> str:
        """Such as ``α = 0.1, δ = 0.5``."""
        known = zip("αδ", self.setting, strict=True)
        return ", ".join(f"{name} = {value:g}" for name, value in known if value is not None)

    def minus(self, other: Row | None) -> Difference | None:
        """Its score minus another's, over the seeds that both have."""
        if other is None or other.label == self.label:
            return None
        return differences(self.scores, other.scores)


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
            rounds = float(np.mean([len(result.run.records) for result in group]))
            scores = {seed: 100 * one[metric] for seed, one in found.items()}
            rows.append(Row(case, setting, label, scores, figures | {"rounds": rounds}))
    return rows


def show_pairs(
    output: Output,
    name: str,
    title: str,
    found: Sequence[tuple[Case, Sequence[FoundRun]]],
    subject: str | None = None,
    part_of: Callable[[Row], Hashable] = lambda _: None,
) -> None:
    """Every method beside fairness + toleration, and beside the `subject` that a study is about.

    p-values are corrected within each part of a study, so that one made with few seeds to look
    around does not drown the comparison that decides.
    """
    rows = [row for case, results in found for row in rows_of(case, results)]
    if not rows:
        return
    known = {(row.case.name, row.setting, row.label): row for row in rows}

    def beside(row: Row, label: str | None) -> Row | None:
        return known.get((row.case.name, row.setting, label or ""))

    parts = [part_of(row) for row in rows]
    compared = [_compared([row.minus(beside(row, FAIR_AND_TOLERANT)) for row in rows], parts)]
    columns = [f"{column}_from_fair" for column in AGAINST]
    if subject is not None:
        pairs = [one.minus(row) if (one := beside(row, subject)) else None for row in rows]
        compared.append(_compared(pairs, parts))
        columns += [f"{column}_of_{subject.lower()}" for column in AGAINST]
    cells = [_about(row) for row in rows]
    lines = [
        (*own, *(cell for against in beside_others for cell in against))
        for own, *beside_others in zip(cells, *compared, strict=True)
    ]
    output.csv(name, (*ALONE, *columns), lines)
    first = ["data set", "", "method"]
    headings = [*first, "runs", "score", "from fair + tolerant", "p"]
    headings += [f"{subject} ahead by", "p"] if subject else []
    scores: dict[str, list[list[str]]] = {}
    costs: dict[str, list[list[str]]] = {}
    for row, own, *others in zip(rows, cells, *compared, strict=True):
        runs, score, std, area, reached, to_target, up, down, seconds = own[5:]
        deviation = "" if std is None else f" ± {std:.2f}"
        intervals = [cell for against in others for cell in _interval(against)]
        about = [row.case.full_title, row.setting_in_words, row.label]
        scores.setdefault(row.case.name, []).append(
            [*about, str(runs), _shown(score, 2) + deviation, *intervals]
        )
        in_time = f"{_shown(to_target, 0)} ({reached} of {runs})"
        costs.setdefault(row.case.name, []).append(
            [*about, _shown(area, 2), in_time, *(_shown(cost, 2) for cost in (up, down, seconds))]
        )
    output.table(title, headings, scores.values())
    headings = [*first, "mean over rounds", "rounds to target", "MB up", "MB down", "s a round"]
    output.table("On the way, and at what cost", headings, costs.values())
    output.figure(name, _draw(rows, subject))


def _compared(
    pairs: Sequence[Difference | None], parts: Sequence[Hashable]
) -> list[tuple[Any, ...]]:
    """Cells of differences, with p-values corrected for how many there are in their part."""
    corrected: list[float | None] = [None] * len(pairs)
    for part in set(parts):
        places = [place for place, one in enumerate(parts) if one == part]
        found = [None if (pair := pairs[place]) is None else pair.p for place in places]
        for place, p in zip(places, holm(found), strict=True):
            corrected[place] = p
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
        int(figures["reached"]),
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


def _draw(rows: Sequence[Row], subject: str | None) -> Any:
    """Differences, a panel per data set and a marker per class mix and share of stragglers.

    Of the subject from every method where there is one, of every method from fairness + toleration
    otherwise.
    """
    other = subject or FAIR_AND_TOLERANT
    cases = list(dict.fromkeys(row.case for row in rows))
    labels = list(dict.fromkeys(row.label for row in rows if row.label != other))
    settings = list(dict.fromkeys(row.setting for row in rows))
    figure = new_figure(2.6 * len(cases) + 2.2, 0.26 * len(labels) + 1.3)
    panels = figure.subplots(1, len(cases), squeeze=False, sharey=True)[0]
    known = {(row.case, row.setting, row.label): row for row in rows}
    for (case, setting, label), row in known.items():
        against = known.get((case, setting, other))
        pair = against and (against.minus(row) if subject else row.minus(against))
        if not pair:
            continue
        index = settings.index(setting)
        panels[cases.index(case)].errorbar(
            pair.mean,
            labels.index(label) + 0.12 * index,
            xerr=None if pair.high is None else pair.high - pair.mean,
            fmt="os^Dv<>"[index % 7],
            color=COLORS[index % len(COLORS)],
            markersize=4,
            capsize=2,
            label=row.setting_in_words,
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
