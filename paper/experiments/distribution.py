"""Figure S1: how the classes of PASCAL VOC are spread over clients, for every α."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fedproto.data.base import data_root
from fedproto.data.federation import Federation, class_counts
from fedproto.errors import DataError
from fedproto.report.figures import draw_class_mix
from fedproto.report.style import COLORS, new_figure
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
            output.figure("distribution", _panels(rows))


def _panels(federations: Sequence[tuple[str, Federation]]) -> Any:
    """Classes per client, clients per number of classes, and the class mix of 30 random clients.

    One row per federation.
    """
    figure = new_figure(10, 2.4 * len(federations) + 0.4)
    rows = figure.subplots(len(federations), 3, squeeze=False)
    for (title, federation), panels in zip(federations, rows, strict=True):
        counts = class_counts(federation)
        classes = (counts > 0).sum(axis=1)
        panels[0].bar(np.arange(len(classes)), classes, width=1.0, color=COLORS[0])
        panels[0].set_ylabel(f"{title}\n# classes" if title else "# classes")
        panels[0].set_ylim(0, counts.shape[1] + 0.5)
        panels[1].bar(
            np.arange(counts.shape[1] + 1),
            np.bincount(classes, minlength=counts.shape[1] + 1),
            color=COLORS[0],
        )
        panels[1].set_ylabel("# clients")
        draw_class_mix(panels[2], counts)
    heads = ("Distribution of # classes", "Distribution of # clients", "Class mix per client")
    feet = ("client ID (k)", "# classes per client", "class distribution")
    for column, (head, foot) in enumerate(zip(heads, feet, strict=True)):
        rows[0][column].set_title(head, fontsize="medium")
        rows[-1][column].set_xlabel(foot)
    return figure
