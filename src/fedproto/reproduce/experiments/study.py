"""Beyond the paper: does any margin-guided rule beat equal weights with toleration?

The variants come from the recipes ``attention-study-DATASET``.
"""

from __future__ import annotations

import math

from fedproto.reproduce.base import EXPERIMENTS, Experiment, FoundRuns
from fedproto.reproduce.cases import CLASSIFICATION, Case, Scope
from fedproto.reproduce.library import Request
from fedproto.reproduce.output import Output
from fedproto.reproduce.pairs import show_pairs


@EXPERIMENTS.register("study")
class AttentionStudy(Experiment):
    """Sharper and reversed attention against equal weights with toleration, paired by seed."""

    title = "Study: margin-guided attention against equal weights (not in the paper)"
    cases = CLASSIFICATION

    def requests(self, scope: Scope) -> list[Request]:
        """All runs of the study's recipes; at smoke scale two seeds of them."""
        own, enough = scope.seeds is None, 2 if scope.scale == "smoke" else math.inf
        return [
            Request(case.name, config)
            for case in scope.cases(self.cases)
            for config in case.runs(recipe=recipe_of(case), own_seeds=own)
            if not own or config.seed < enough
        ]

    def render(self, scope: Scope, results: FoundRuns, output: Output) -> None:
        """A table and a panel per data set."""
        found = [(case, results.select(case.name)) for case in scope.cases(self.cases)]
        show_pairs(output, "study", self.title, found)


def recipe_of(case: Case) -> str:
    """The name of a data set's recipe of the study."""
    return f"attention-study-{case.name}"
