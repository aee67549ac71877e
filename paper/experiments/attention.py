"""Figure S2: how attention values are spread over clients and rounds, FedAvg beside FedProto."""

from __future__ import annotations

from typing import Any

import numpy as np

from fedproto.report.style import add_legend, new_figure
from paper.base import EXPERIMENTS, Experiment, FoundRuns
from paper.cases import CLASSIFICATION, Scope
from paper.library import Request
from paper.output import Output
from paper.panels import line_of

SHOWN = ("FedAvg", "FedProto")
COLUMNS = ("data_set", "trained_on", "method", "values", "mean", "std", "smallest", "largest")


@EXPERIMENTS.register("attention")
class AttentionHistograms(Experiment):
    """The clients' weights in the average, of all rounds, δ and seeds."""

    title = "Figure S2: distribution of the attention values"
    cases = CLASSIFICATION

    def requests(self, scope: Scope) -> list[Request]:
        """The runs of FedAvg and FedProto."""
        return [
            Request(case.name, config)
            for case in scope.cases(self.cases)
            for config in case.runs(lambda config: config.title in SHOWN)
        ]

    # Long: a table and its figure, from top to bottom.
    def render(self, scope: Scope, results: FoundRuns, output: Output) -> None:
        """A panel per data set, and how wide each distribution is."""
        output.say(
            "The paper gives no figures for these histograms, only the picture. A client of a"
            " cohort of K' has 1/K' under fairness, which is what the values are spread around."
        )
        cases = scope.cases(self.cases)
        figure = new_figure(3.2 * len(cases) + 0.3, 2.9)
        lines: list[tuple[Any, ...]] = []
        handles: dict[str, Any] = {}
        for case, axes in zip(cases, figure.subplots(1, len(cases), squeeze=False)[0], strict=True):
            values = {}
            for label in SHOWN:
                weights = [
                    weight
                    for found in results.select(case.name, label)
                    for record in found.run.records
                    if len(record.attention) > 1
                    for weight in record.attention.values()
                ]
                if weights:
                    values[label] = np.array(weights)
            if values:
                bins = np.linspace(0, max(found.max() for found in values.values()), 41)
            for label, found in values.items():
                look = line_of(label)
                _, _, outline = axes.hist(
                    found,
                    bins=bins,
                    histtype="stepfilled",
                    edgecolor=look["color"],
                    facecolor=(look["color"], 0.3),
                    linestyle=look["linestyle"],
                    linewidth=1.4,
                )
                handles[label] = outline[0]
                lines.append(
                    (
                        case.title,
                        case.stands_in,
                        label,
                        len(found),
                        found.mean(),
                        found.std(),
                        found.min(),
                        found.max(),
                    )
                )
            axes.set_title(case.full_title, fontsize="medium")
            axes.set_xlabel("federated attention value")
            axes.set_ylabel("occurrences")
            axes.grid(alpha=0.3)
        add_legend(figure, handles)
        output.table(self.title, output.csv("attention", COLUMNS, lines))
        output.figure("attention", figure)
