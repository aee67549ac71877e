"""Figures 2 to 4: curves over rounds on the four data sets."""

from __future__ import annotations

from typing import ClassVar

from fedproto.measures.scores import TRAINING_LOSS
from paper.base import EXPERIMENTS, Experiment, FoundRuns
from paper.cases import CLASSIFICATION, Scope
from paper.library import Request
from paper.output import Output
from paper.panels import Panel, methods_of, show_panels


class CurvesFigure(Experiment):
    """A row per measure, a column per data set; mean and spread over δ and seeds.

    Attributes:
        rows: Per measure its name, label and factor, and whether the scale is logarithmic.
        remark: What the paper has beside it.
    """

    cases = CLASSIFICATION
    rows: ClassVar[tuple[tuple[str, str, float, bool], ...]]
    remark: ClassVar[str]

    def render(self, scope: Scope, results: FoundRuns, output: Output) -> None:
        """Moving averages over 10 % of the rounds."""
        output.say(self.remark)
        rows = [
            [
                Panel(
                    case,
                    metric,
                    "" if row else case.full_title,
                    ylabel,
                    methods_of(results, case.name),
                    factor,
                    log,
                )
                for case in scope.cases(self.cases)
            ]
            for row, (metric, ylabel, factor, log) in enumerate(self.rows)
        ]
        show_panels(output, EXPERIMENTS.name_of(type(self)), rows)


@EXPERIMENTS.register("curves")
class ScoreCurves(CurvesFigure):
    """Accuracy, losses and gradient dissimilarity of the aggregate models."""

    title = "Figure 2: accuracy, loss and gradient dissimilarity over rounds"
    remark = "The paper gives no figures for these curves, only the picture."
    rows = (
        ("accuracy", "test accuracy (%)", 100.0, False),
        (TRAINING_LOSS, "training loss", 1.0, False),
        ("loss", "test loss", 1.0, False),
        ("dissimilarity", "dissimilarity", 1.0, True),
    )

    def requests(self, scope: Scope) -> list[Request]:
        """All runs of the four recipes, with dissimilarity and training loss measured."""
        return self.runs_of_all_cases(scope, wishes={"dissimilarity", "loss"})


@EXPERIMENTS.register("amm")
class MarginCurves(CurvesFigure):
    """AMM of the aggregate models; what is taken for it is in `equations.aggregate_mean_margin`."""

    title = "Figure 3: aggregate mean margin over rounds"
    remark = (
        "The paper gives no figures for these curves; for their ends see 'margins'. The margin"
        " is d⁻ of the prototypes before normalisation, since the printed formula is always 1."
    )
    rows = (("aggregate_mean_margin", "aggregate mean margin", 1.0, False),)

    def requests(self, scope: Scope) -> list[Request]:
        """All runs of the four recipes, with the margin measured."""
        return self.runs_of_all_cases(scope, needs={"margin"})


@EXPERIMENTS.register("mmd")
class DiscrepancyCurves(CurvesFigure):
    """MMD between the features of the aggregate and of the centralised model."""

    title = "Figure 4: MMD to the centralised model over rounds"
    remark = "The paper gives no figures for these curves; for their ends see 'margins'."
    rows = (("mmd", "MMD²", 1.0, False),)

    def requests(self, scope: Scope) -> list[Request]:
        """The federated runs of the four recipes, compared with the centralised one."""
        return self.runs_of_all_cases(scope, needs={"mmd"}, centralized=False)
