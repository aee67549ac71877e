"""Figure 3: the aggregate mean margin over rounds."""

from __future__ import annotations

from fedproto.reproduce.base import EXPERIMENTS, Experiment, Results
from fedproto.reproduce.cases import CLASSIFICATION, Scope
from fedproto.reproduce.library import Request
from fedproto.reproduce.output import Output
from fedproto.reproduce.panels import Panel, methods_of, show_panels, titled


@EXPERIMENTS.register("amm")
class MarginCurves(Experiment):
    """AMM of the aggregate models; what is taken for it is in `equations.aggregate_mean_margin`."""

    title = "Figure 3: aggregate mean margin over rounds"
    cases = CLASSIFICATION

    def requests(self, scope: Scope) -> list[Request]:
        """All runs of the four recipes, with the margin measured."""
        return self.runs_of_all_cases(scope, needs={"margin"})

    def render(self, scope: Scope, results: Results, output: Output) -> None:
        """A panel per data set."""
        output.say(
            "The paper gives no figures for these curves; for their ends see 'margins'. The margin"
            " is d⁻ of the prototypes before normalisation, since the printed formula is always 1."
        )
        show_panels(
            output,
            "amm",
            [
                [
                    Panel(
                        case,
                        "aggregate_mean_margin",
                        titled(case),
                        "aggregate mean margin",
                        methods_of(results, case.name),
                    )
                    for case in scope.cases(self.cases)
                ]
            ],
        )
