"""Table 4: margin of the final aggregate model, and federated feature discrepancy (FFD)."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

from scipy.stats import pearsonr

from fedproto.measures.features import PER_CHANNEL
from paper.base import EXPERIMENTS, FoundRun, FoundRuns
from paper.cases import CENTRALIZED, CLASSIFICATION, Scope
from paper.comparison import Comparison, ComparisonTable
from paper.curves import Averaged, final_value, spread, spread_of
from paper.library import Request
from paper.output import Output
from paper.printed import paper, printed

BASELINE = "FedAvg"
MARGINS = {
    "aggregate_mean_margin": "aggregate mean margin",
    PER_CHANNEL: "aggregate mean margin / √D",
}
"""The margin's two readings; the paper's figures stand beside both."""


@EXPERIMENTS.register("margins")
class MarginTable(ComparisonTable):
    """AMM and FFD after the last round, and how AMM goes along with accuracy."""

    title = "Table 4: margin of the final model and FFD"
    cases = CLASSIFICATION

    def requests(self, scope: Scope) -> list[Request]:
        """All runs of the four recipes, with margin and MMD measured."""
        return self.runs_of_all_cases(scope, wishes={"margin", "mmd"})

    def rows(self, scope: Scope, results: FoundRuns, output: Output) -> list[Comparison]:
        """Margins, as they are and divided by √D, then FFD against FedAvg."""
        del output
        rows = []
        for metric, quantity in MARGINS.items():
            for case in scope.cases(self.cases):
                for label in results.labels(case.name):
                    ours = spread(results.select(case.name, label), metric)
                    paper = printed("margin", case.name, label)
                    rows.append(Comparison(case, quantity, label, ours, paper))
        for case in scope.cases(self.cases):
            for label in results.labels(case.name):
                if label not in (BASELINE, CENTRALIZED):
                    ours = discrepancy(
                        results.select(case.name, label), results.select(case.name, BASELINE)
                    )
                    paper = printed("ffd", case.name, label)
                    rows.append(Comparison(case, "FFD (%)", label, ours, paper))
        return rows

    def render(self, scope: Scope, results: FoundRuns, output: Output) -> None:
        """The table, the same as a picture, then the correlation."""
        super().render(scope, results, output)
        self._correlate(scope, results, output)

    def _correlate(self, scope: Scope, results: FoundRuns, output: Output) -> None:
        """Pearson's ρ of margin and accuracy over data sets and methods, ours and the paper's."""
        pairs = []
        for case in scope.cases(self.cases):
            for label in results.labels(case.name):
                chosen = results.select(case.name, label)
                margin = spread(chosen, "aggregate_mean_margin")
                accuracy = spread(chosen, "accuracy")
                if margin is not None and accuracy is not None:
                    pairs.append((margin.mean, accuracy.mean))
        both = [
            (value, printed("accuracy", case, label))
            for case, row in paper()["margin"].items()
            for label, value in row.items()
        ]
        lines = [
            ("ours", *_pearson(pairs)),
            ("paper, as printed", paper()["correlation"]["rho"], paper()["correlation"]["p"], None),
            (
                "paper, from its own tables",
                *_pearson([(margin, found.mean) for margin, found in both if found is not None]),
            ),
        ]
        title = "Correlation of margin and accuracy over data sets and methods"
        columns = ("row", "rho", "p", "points")
        output.table(title, output.csv("margins-correlation", columns, lines), by="row")


def discrepancy(of: Sequence[FoundRun], baseline: Sequence[FoundRun]) -> Averaged | None:
    """FFD in per cent: how much nearer to centralised training than the baseline of the same δ.

    ``FFD(A, B) = (MMD_B − MMD_A) / MMD_B × 100``, of MMD, not of the MMD² that is measured; an
    estimate of A below 0 is as near as can be told, and counts as 0.

    One value per δ and seed, from the MMD at the last nominal round. A baseline whose unbiased
    estimate is not above 0 is as near as can be told, and there is nothing to be nearer than.
    """
    by_delta: dict[float, list[float]] = defaultdict(list)
    others = {(each.delta, each.seed): final_value(each.run, "mmd") for each in baseline}
    for result in of:
        value = final_value(result.run, "mmd")
        other = others.get((result.delta, result.seed))
        if value is not None and other is not None and other > 0:
            by_delta[result.delta].append(100 * (1 - math.sqrt(max(value, 0.0) / other)))
    return spread_of(list(by_delta.values()))


def _pearson(pairs: Sequence[tuple[float, float]]) -> tuple[float | None, float | None, int]:
    """ρ, its p-value and the number of points; None where there are too few to say."""
    margins, accuracies = [margin for margin, _ in pairs], [accuracy for _, accuracy in pairs]
    if len(pairs) < 3 or min(len(set(margins)), len(set(accuracies))) < 2:
        return None, None, len(pairs)
    found = pearsonr(margins, accuracies)
    return float(found.statistic), float(found.pvalue), len(pairs)
