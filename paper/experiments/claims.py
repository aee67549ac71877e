"""The paper's claims one by one, each with a verdict from the runs that there are.

Only seeds are repetitions: runs of one seed at several δ share data, initial weights, cohorts and
batches, so a seed's differences are averaged over δ first. A claim *holds* or is *contradicted*
where Student's t over at least three seeds says so, corrected by Holm for the data sets that the
claim is tested on; with fewer seeds, and otherwise, it is *unclear*.
"""

from __future__ import annotations

import functools
import tomllib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Literal, TypeAlias

import numpy as np
import pandas as pd

from fedproto.report import statistics
from fedproto.report.results import StoredRun
from fedproto.report.statistics import Difference, sample_deviation
from paper.base import EXPERIMENTS, Experiment, FoundRun, FoundRuns
from paper.cases import CLASSIFICATION, SEGMENTATION, Case, Scope
from paper.curves import final_value
from paper.library import Request, merged
from paper.output import Output

COLUMNS = ("claim", "data_set", "trained_on", "metric", "of", "than", "seeds", "difference", "low",
           "high", "corrected_p", "verdict")  # fmt: skip
Verdict: TypeAlias = Literal["holds", "contradicted", "unclear"]
MARKS: dict[Verdict, str] = {"holds": "✓", "contradicted": "✗", "unclear": "?"}


@dataclass(frozen=True)
class Claim:
    """A claim of the paper as a comparison; the fields are those of ``claims.toml``."""

    claim: str
    metric: str
    of: str
    than: str
    how: Literal["above", "below", "level", "steadier"]
    over: Literal["end", "rounds"] = "end"
    within: float = 0.0
    factor: float = 1.0
    cases: tuple[str, ...] = CLASSIFICATION


@functools.cache
def claims() -> tuple[Claim, ...]:
    """The claims of ``claims.toml``."""
    text = (Path(__file__).parents[1] / "claims.toml").read_text(encoding="utf-8")
    return tuple(
        Claim(**{**entry, "cases": tuple(entry.get("cases", CLASSIFICATION))})
        for entry in tomllib.loads(text)["claims"]
    )


def measured(claim: Claim, of: Sequence[FoundRun], than: Sequence[FoundRun]) -> Difference | None:
    """The difference that a claim is about, over seeds; None where no seed has both sides."""
    ours, theirs = _by_condition(of, claim), _by_condition(than, claim)
    shared = [condition for condition in ours if condition in theirs]
    if claim.how == "steadier":
        sides = [[side[each] for each in shared] for side in (ours, theirs)]
        found, other = map(_spread_per_seed, sides)
    else:
        found = mean_per_seed(
            {
                seed: value - theirs[each][seed]
                for seed, value in ours[each].items()
                if seed in theirs[each]
            }
            for each in shared
        )
        other = dict.fromkeys(found, 0.0)
    values = [claim.factor * (found[seed] - other[seed]) for seed in found if seed in other]
    return statistics.difference(values) if values else None


def judge(
    claim: Claim, found: Sequence[Difference | None]
) -> list[tuple[float | None, Verdict] | None]:
    """The corrected p-value and the verdict on each data set that a claim is tested on."""
    lower = claim.how in ("below", "steadier")
    words = statistics.judge(found, lower=lower, margin=claim.within or None)
    return [one and (one.p, _verdict(claim, one)) for one in words]


def as_markdown(frame: pd.DataFrame) -> str:
    """A row per claim, a column per data set: mark, difference, and interval or number of seeds."""

    def cell(row: pd.Series) -> str:
        if pd.isna(row["difference"]):
            return "–"
        size, points = abs(row["difference"]), row["metric"] in ("accuracy", "miou")
        digits = 1 if size >= (0.095 if points else 9.5) else 2
        about = f"{MARKS[row['verdict']]} {row['difference']:+.{digits}f}"
        if row["seeds"] < statistics.FEWEST_PAIRS:
            about += f" ({row['seeds']:.0f})"
        else:
            about += f" [{row['low']:.{digits}f}, {row['high']:.{digits}f}]"
        return about.replace("-", "−")

    sets = list(frame["data_set"].unique())
    lines = [["claim", *sets], ["---"] * (len(sets) + 1)]
    for claim, group in frame.groupby("claim", sort=False):
        cells = {row["data_set"]: cell(row) for _, row in group.iterrows()}
        lines.append([str(claim), *(cells.get(one, "–") for one in sets)])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _verdict(claim: Claim, found: statistics.Verdict) -> Verdict:
    low, high = found.difference.low, found.difference.high
    if claim.how == "level":
        if found.p is None or low is None or high is None:
            return "unclear"
        if max(-low, high) <= claim.within:
            return "holds"
        outside = found.word in ("better", "worse") and (low > claim.within or high < -claim.within)
        return "contradicted" if outside else "unclear"
    words: dict[str, Verdict] = {"better": "holds", "worse": "contradicted"}
    return words.get(found.word, "unclear")


def _by_condition(
    runs: Iterable[FoundRun], claim: Claim
) -> dict[tuple[float | None, float], dict[int, float]]:
    """A value per seed, for every class mix and share of stragglers."""
    values: dict[tuple[float | None, float], dict[int, float]] = defaultdict(dict)
    value: float | None
    for each in runs:
        if claim.metric == "attention":
            value = _attention_deviation(each.run)
        elif claim.over == "rounds":
            _, curve = each.run.curve(claim.metric)
            value = float(curve.mean()) if len(curve) else None
        else:
            value = final_value(each.run, claim.metric)
        if value is not None:
            values[each.alpha, each.delta][each.seed] = value
    return values


def _attention_deviation(run: StoredRun) -> float | None:
    """The standard deviation of all clients' weights in multiples of an equal one.

    Over the rounds in which several clients took part; None where there is no such round.
    """
    weights = [
        weight * len(record.attention)
        for record in run.records
        if len(record.attention) > 1
        for weight in record.attention.values()
    ]
    return float(np.std(weights)) if weights else None


def mean_per_seed(conditions: Iterable[Mapping[int, float]]) -> dict[int, float]:
    """Values under several conditions as one per seed, for the seeds that all conditions have.

    Conditions of one seed share data, weights and cohorts, so they are not repetitions.
    """
    values = list(conditions)
    shared = [seed for seed in values[0] if all(seed in one for one in values)] if values else []
    return {seed: float(np.mean([one[seed] for one in values])) for seed in shared}


def _spread_per_seed(conditions: Sequence[dict[int, float]]) -> dict[int, float]:
    """The standard deviation over conditions, of the seeds that all conditions have."""
    seeds = set.intersection(*map(set, conditions)) if conditions else set()
    found = {seed: sample_deviation([each[seed] for each in conditions]) for seed in sorted(seeds)}
    return {seed: value for seed, value in found.items() if value is not None}


@EXPERIMENTS.register("claims")
class Claims(Experiment):
    """A verdict per claim and data set."""

    title = "The paper's claims"
    cases: ClassVar[tuple[str, ...]] = CLASSIFICATION + SEGMENTATION

    def requests(self, scope: Scope) -> list[Request]:
        """The runs of all recipes and of the ablation, with what the claims are about measured."""
        wishes = {"loss", "dissimilarity", "margin", "mmd"}
        ablation = EXPERIMENTS.get("ablation")()
        # Claims about segmentation are about scores alone, which every run has.
        asked = [
            replace(request, wishes=frozenset()) if request.case in SEGMENTATION else request
            for request in self.runs_of_all_cases(scope, wishes=wishes)
        ]
        return merged([*asked, *ablation.requests(scope)])

    def stated(self) -> Sequence[Claim]:
        """The claims."""
        return claims()

    def sides(
        self, claim: Claim, case: Case, results: FoundRuns
    ) -> tuple[Sequence[FoundRun], Sequence[FoundRun]]:
        """The runs that a claim is of, and those that it compares them with."""
        return results.select(case.name, claim.of), results.select(case.name, claim.than)

    def render(self, scope: Scope, results: FoundRuns, output: Output) -> None:
        """A line per claim and data set."""
        lines = []
        for claim in self.stated():
            cases = scope.cases(claim.cases)
            found = [measured(claim, *self.sides(claim, case, results)) for case in cases]
            for case, one, word in zip(cases, found, judge(claim, found), strict=True):
                about = (
                    claim.claim,
                    case.title,
                    case.stands_in,
                    claim.metric,
                    claim.of,
                    claim.than,
                )
                numbers = (None,) * 4 if one is None else (one.pairs, one.mean, one.low, one.high)
                lines.append((*about, *numbers, *(word or (None, None))))
        name = EXPERIMENTS.name_of(type(self))
        frame = output.csv(name, COLUMNS, lines)
        output.markdown(name, as_markdown(frame))
        output.table(self.title, frame.drop(columns=["metric", "of", "than"]), by="claim")
