"""Figure 2: accuracy, loss and gradient dissimilarity over rounds on the four data sets."""

from __future__ import annotations

from fedproto.measures.loss import TRAINING_LOSS
from fedproto.reproduce.base import EXPERIMENTS, Experiment, Results
from fedproto.reproduce.cases import CLASSIFICATION, Scope
from fedproto.reproduce.library import Request
from fedproto.reproduce.output import Output
from fedproto.reproduce.panels import Panel, methods_of, show_panels, titled

ROWS = (
    ("accuracy", "test accuracy (%)", 100.0, False),
    (TRAINING_LOSS, "training loss", 1.0, False),
    ("loss", "test loss", 1.0, False),
    ("dissimilarity", "dissimilarity", 1.0, True),
)


@EXPERIMENTS.register("curves")
class Curves(Experiment):
    """Mean and spread over δ and seeds, moving average over 10 % of the rounds."""

    title = "Figure 2: accuracy, loss and gradient dissimilarity over rounds"
    cases = CLASSIFICATION

    def requests(self, scope: Scope) -> list[Request]:
        """All runs of the four recipes, with dissimilarity and training loss measured."""
        return self.runs_of_all_cases(scope, wishes={"dissimilarity", "loss"})

    def render(self, scope: Scope, results: Results, output: Output) -> None:
        """A row per measure, a column per data set."""
        output.say("The paper gives no figures for these curves, only the picture.")
        rows = [
            [
                Panel(
                    case,
                    metric,
                    titled(case) if metric == "accuracy" else "",
                    ylabel,
                    methods_of(results, case.name),
                    factor,
                    log,
                )
                for case in scope.cases(self.cases)
            ]
            for metric, ylabel, factor, log in ROWS
        ]
        show_panels(output, "curves", rows)
