"""From what the study of guidance took every method's main parameter, on the validation part."""

from __future__ import annotations

from typing import Any

from fedproto.report.summary import figures_of
from paper.base import EXPERIMENTS, Experiment, FoundRun, FoundRuns
from paper.cases import CLASSIFICATION, Case, Scope
from paper.library import Request, validation_score
from paper.output import Output

COLUMNS = (
    "data_set",
    "trained_on",
    "method",
    "parameter",
    "validation_score",
    "validation_mean_over_rounds",
    "best",
)
SMOKE = ("Fairness + toleration", "FedRS", "Head by class")


@EXPERIMENTS.register("guidance-grid")
class GuidanceGrid(Experiment):
    """The grid of every method's main parameter, judged on the validation part alone."""

    title = "Study of guidance: parameters and their scores on the validation part"
    cases = CLASSIFICATION

    def requests(self, scope: Scope) -> list[Request]:
        """All runs of the recipes ``guidance-grid-DATASET``; at smoke scale a few of one."""
        return [
            Request(case.name, config, validated=True)
            for case in scope.cases(self.cases)
            for config in case.runs(
                recipe=f"guidance-grid-{case.name}", own_seeds=scope.seeds is None
            )
            if scope.scale != "smoke"
            or (case.name == "synthetic" and _split(config.title)[0] in SMOKE)
        ]

    def render(self, scope: Scope, results: FoundRuns, output: Output) -> None:
        """The values of every method's parameter with their scores; the best is marked."""
        lines = [
            line
            for case in scope.cases(self.cases)
            for line in _lines(case, results.select(case.name))
        ]
        output.table(self.title, output.csv("guidance-grid", COLUMNS, lines))


def _lines(case: Case, results: list[FoundRun]) -> list[tuple[Any, ...]]:
    """What was tried on a data set; the best is that with the best score at the end."""
    found = []
    for result in results:
        metric = validation_score(result.run)
        figures = figures_of(result.run, metric)
        if metric in figures:
            scores = (100 * figures[metric], 100 * figures["mean over rounds"])
            found.append((*_split(result.label), *scores))
    best = {method: max(s for m, _, s, _ in found if m == method) for method, *_ in found}
    return [
        (case.title, case.stands_in, method, parameter, score, mean, score == best[method])
        for method, parameter, score, mean in found
    ]


def _split(label: str) -> tuple[str, str]:
    """Method and parameter, which a label of the grid has before and after a colon."""
    method, _, parameter = label.partition(": ")
    return method, parameter
