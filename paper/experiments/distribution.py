"""Figure S1: how the classes of PASCAL VOC are spread over clients, for every α."""

from __future__ import annotations

from fedproto.data.base import data_root
from fedproto.data.statistics import class_counts
from fedproto.errors import DataError
from fedproto.report.figures import class_mix_figure
from paper.base import EXPERIMENTS, Experiment, FoundRuns
from paper.cases import Scope
from paper.output import Output

COLUMNS = ("data_set", "shared_out", "alpha", "clients", "mean_classes", "fewest", "most")


@EXPERIMENTS.register("distribution")
class DistributionPanels(Experiment):
    """Classes per client, clients per number of classes, and the class mix of 30 clients."""

    title = "Figure S1: classes of the clients, for every α"
    cases = ("fpascal",)

    def render(self, scope: Scope, results: FoundRuns, output: Output) -> None:
        """A row of three panels per α."""
        del results
        output.say("The paper gives no figures for these panels, only the picture.")
        for case in scope.cases(self.cases):
            rows, lines = [], []
            for source in case.sources():
                alpha = float(getattr(source, "alpha", 0.0))
                try:
                    federation = source.load(data_root())
                except DataError as error:
                    output.say(f"{case.name} is left out: {error}")
                    return
                classes = (class_counts(federation) > 0).sum(axis=1)
                rows.append((f"α = {alpha:g}", federation))
                lines.append(
                    (
                        case.title,
                        case.stands_in,
                        alpha,
                        len(classes),
                        float(classes.mean()),
                        int(classes.min()),
                        int(classes.max()),
                    )
                )
            output.table(self.title, output.csv("distribution", COLUMNS, lines))
            output.figure("distribution", class_mix_figure(rows))
