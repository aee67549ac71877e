"""Figure 4: the distance of the features from those of centralised training, over rounds."""

from __future__ import annotations

from fedproto.reproduce.base import EXPERIMENTS, Experiment, Results
from fedproto.reproduce.cases import CLASSIFICATION, Scope
from fedproto.reproduce.library import Request
from fedproto.reproduce.output import Output
from fedproto.reproduce.panels import Panel, methods_of, show_panels, titled


@EXPERIMENTS.register("mmd")
class DiscrepancyCurves(Experiment):
    """MMD between the features of the aggregate and of the centralised model."""

    title = "Figure 4: MMD to the centralised model over rounds"
    cases = CLASSIFICATION

    def requests(self, scope: Scope) -> list[Request]:
        """The federated runs of the four recipes, compared with the centralised one."""
        return self.runs_of_all_cases(scope, needs={"mmd"}, centralized=False)

    def render(self, scope: Scope, results: Results, output: Output) -> None:
        """A panel per data set."""
        output.say("The paper gives no figures for these curves; for their ends see 'margins'.")
        show_panels(
            output,
            "mmd",
            [
                [
                    Panel(case, "mmd", titled(case), "MMD²", methods_of(results, case.name))
                    for case in scope.cases(self.cases)
                ]
            ],
        )
