"""The accuracy and loss table: final accuracy and loss of the methods on the four data sets."""

from __future__ import annotations

from fedproto.measures.scores import TRAINING_LOSS
from paper.base import EXPERIMENTS, FoundRuns
from paper.cases import CLASSIFICATION, Scope
from paper.comparison import Comparison, ComparisonTable
from paper.curves import spread
from paper.library import Request
from paper.output import Output
from paper.printed import printed


@EXPERIMENTS.register("accuracy")
class AccuracyTable(ComparisonTable):
    """Final accuracy and loss, mean and spread over δ."""

    title = "Table 2: final accuracy and loss of the methods"
    cases = CLASSIFICATION

    def requests(self, scope: Scope) -> list[Request]:
        """All runs of the four recipes, with the training loss measured."""
        return self.runs_of_all_cases(scope, wishes={"loss"})

    def rows(self, scope: Scope, results: FoundRuns, output: Output) -> list[Comparison]:
        """Four methods, fairness + toleration and centralised training."""
        del output
        rows = []
        for metric, table, quantity, factor in (
            ("accuracy", "accuracy", "test accuracy (%)", 100.0),
            (TRAINING_LOSS, "loss", "training loss over all clients", 1.0),
            ("loss", "", "test loss", 1.0),
        ):
            for case in scope.cases(self.cases):
                for label in results.labels(case.name):
                    ours = spread(results.select(case.name, label), metric, factor)
                    paper = printed(table, case.name, label)
                    rows.append(Comparison(case, quantity, label, ours, paper))
        return rows
