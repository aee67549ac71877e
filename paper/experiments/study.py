"""Beyond the paper: does any margin-guided rule beat equal weights with toleration?

The variants come from the recipes ``attention-study-DATASET``.
"""

from __future__ import annotations

import math

from paper.base import EXPERIMENTS, Experiment, FoundRuns
from paper.cases import CLASSIFICATION, Scope
from paper.library import Request
from paper.output import Output
from paper.pairs import show_pairs


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
            for config in case.runs(recipe=f"attention-study-{case.name}", own_seeds=own)
            if not own or config.seed < enough
        ]

    def render(self, scope: Scope, results: FoundRuns, output: Output) -> None:
        """A table and a panel per data set."""
        found = [(case, results.select(case.name)) for case in scope.cases(self.cases)]
        show_pairs(output, "study", self.title, found)
