"""The ablation table: the paper's ten rows, each at three δ and on average, on MNIST.

Ours has an eleventh, FedAvg with clients drawn by size, which the row *Fairness* is compared with:
all other rows draw every client with the same chance, as the sources do. We also make the table on
synthetic data, where every row has several seeds.
"""

from __future__ import annotations

from paper.base import EXPERIMENTS, FoundRuns
from paper.cases import Scope
from paper.comparison import Comparison, ComparisonTable
from paper.curves import spread
from paper.library import Request
from paper.output import Output
from paper.printed import printed, printed_at_delta


@EXPERIMENTS.register("ablation")
class AblationTable(ComparisonTable):
    """What weighting, sampling, toleration and each margin contribute."""

    title = "Table 3: ablation"
    cases = ("synthetic", "mnist")

    def requests(self, scope: Scope) -> list[Request]:
        """All runs of the ablation's recipes."""
        return [
            Request(case.name, config)
            for case in scope.cases(self.cases)
            for config in case.runs(recipe=f"{case.name}-ablation")
        ]

    def rows(self, scope: Scope, results: FoundRuns, output: Output) -> list[Comparison]:
        """A quantity per δ, and the mean with its spread."""
        del output
        rows = []
        for case in scope.cases(self.cases):
            for delta in [*results.deltas(case.name), None]:
                for label in results.labels(case.name):
                    chosen = results.select(case.name, label, delta=delta)
                    at = "mean over δ" if delta is None else f"δ = {100 * delta:g} %"
                    paper = None
                    if case.name == "mnist":
                        mean = printed("ablation", label)
                        paper = mean if delta is None else printed_at_delta(label, delta)
                    ours = spread(chosen, "accuracy", 100)
                    rows.append(Comparison(case, f"test accuracy (%), {at}", label, ours, paper))
        return rows
