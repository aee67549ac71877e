"""The paper's claims one by one, each with a verdict from the runs that there are.

A comparison is made pair by pair over δ and seeds. *reproduced* and *contradicted* need every pair
on one side, or a 95 % interval of the mean that leaves zero out, and three pairs at least; all else
is *undecided*.
"""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Literal, TypeAlias

from fedproto.report.evidence import FEWEST_PAIRS, difference
from paper.base import EXPERIMENTS, Experiment, FoundRun, FoundRuns
from paper.cases import CLASSIFICATION, SEGMENTATION, Case, Scope
from paper.curves import paired, spread
from paper.library import Request, merged
from paper.output import Output

COLUMNS = ("claim", "data_set", "trained_on", "metric", "of", "than", "pairs", "difference", "low",
           "high", "verdict")  # fmt: skip
Verdict: TypeAlias = Literal["reproduced", "contradicted", "undecided"]


@dataclass(frozen=True)
class Claim:
    """A claim of the paper as a comparison; the fields are those of ``claims.toml``."""

    claim: str
    metric: str
    of: str
    than: str
    how: Literal["above", "below", "level", "steadier"]
    within: float = 0.0
    factor: float = 1.0
    cases: tuple[str, ...] = CLASSIFICATION


@dataclass(frozen=True)
class Judgement:
    """What runs say of a claim on one data set."""

    pairs: int
    difference: float
    low: float | None
    high: float | None
    verdict: Verdict


@functools.cache
def claims() -> tuple[Claim, ...]:
    """What ``claims.toml`` says."""
    text = (Path(__file__).parents[1] / "claims.toml").read_text(encoding="utf-8")
    return tuple(
        Claim(**{**entry, "cases": tuple(entry.get("cases", CLASSIFICATION))})
        for entry in tomllib.loads(text)["claims"]
    )


def judge(claim: Claim, of: Sequence[FoundRun], than: Sequence[FoundRun]) -> Judgement | None:
    """What runs say of a claim; None where they cannot be compared."""
    if claim.how == "steadier":
        ours, others = spread(of, claim.metric), spread(than, claim.metric)
        if not ours or not others or ours.over_deltas is None or others.over_deltas is None:
            return None
        apart = claim.factor * (ours.over_deltas - others.over_deltas)
        verdict: Verdict = "reproduced" if apart < 0 else "contradicted"
        return Judgement(min(ours.runs, others.runs), apart, None, None, verdict)
    values = paired(of, than, claim.metric, claim.factor)
    if not values:
        return None
    found = difference(values)
    return Judgement(found.pairs, found.mean, found.low, found.high, _verdict(claim, values))


def _verdict(claim: Claim, values: Sequence[float]) -> Verdict:
    found = difference(values)
    if found.pairs < FEWEST_PAIRS or found.low is None or found.high is None:
        return "undecided"
    low, high = found.low, found.high
    if claim.how == "level":
        if max(map(abs, (low, high))) <= claim.within:
            return "reproduced"
        outside = low > claim.within or high < -claim.within
        return "contradicted" if outside else "undecided"
    above = low > 0 or found.wins == found.pairs
    if not above and not (high < 0 or found.losses == found.pairs):
        return "undecided"
    return "reproduced" if above == (claim.how == "above") else "contradicted"


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
            for case in scope.cases(claim.cases):
                found = judge(claim, *self.sides(claim, case, results))
                measured = (None,) * 5 if found is None else tuple(vars(found).values())
                about = (claim.claim, case.title, case.stands_in, claim.metric, claim.of)
                lines.append((*about, claim.than, *measured))
        frame = output.csv(EXPERIMENTS.name_of(type(self)), COLUMNS, lines)
        output.table(self.title, frame.drop(columns=["metric", "of", "than"]), by="claim")
