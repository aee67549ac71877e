"""The claim that sorting and partitioning by class gives the same results as α = 0.01."""

from __future__ import annotations

from fedproto.config import RunConfig
from fedproto.reproduce.base import EXPERIMENTS, Experiment, Result, Results
from fedproto.reproduce.cases import SEGMENTATION, Case, Scope
from fedproto.reproduce.curves import spread
from fedproto.reproduce.experiments.claims import Claim, judge
from fedproto.reproduce.library import Request
from fedproto.reproduce.output import Output

ALPHA, WITHIN = 0.01, 1.0
"""The concentration that the claim is about, and what counts as the same, in points of mIoU."""

COLUMNS = ("data_set", "trained_on", "method", "sorted", "dirichlet", "pairs", "difference", "low",
           "high", "verdict")  # fmt: skip


@EXPERIMENTS.register("sorted")
class SortedAgainstDirichlet(Experiment):
    """mIoU where every client has a piece of the images sorted by class, beside α = 0.01."""

    title = "Supplementary: sort-and-partition against α = 0.01"
    cases = SEGMENTATION

    def requests(self, scope: Scope) -> list[Request]:
        """Both partitions, all methods and δ."""

        def at_alpha(config: RunConfig) -> bool:
            return getattr(config.data, "alpha", None) == ALPHA

        return [
            Request(case.name, config)
            for case in scope.cases(self.cases)
            for config in case.runs(at_alpha, recipe=f"{case.name}-sorted")
        ]

    def render(self, scope: Scope, results: Results, output: Output) -> None:
        """A line per data set and method."""
        lines = [
            self._line(case, label, results)
            for case in scope.cases(self.cases)
            for label in results.labels(case.name)
        ]
        output.csv("sorted", COLUMNS, lines)
        cells = [["–" if cell is None else _shown(cell) for cell in line] for line in lines]
        output.table(f"{self.title}: test mIoU (%)", COLUMNS, [cells])

    def _line(self, case: Case, label: str, results: Results) -> tuple[object, ...]:
        of, than = (
            [each for each in results.select(case.name, label) if _partition(each) == name]
            for name in ("sorted", "dirichlet")
        )
        means = [found and 100 * found.mean for found in (spread(of, "miou"), spread(than, "miou"))]
        claim = Claim(self.title, "miou", label, label, "level", WITHIN, 100.0)
        found = judge(claim, of, than)
        measured = (None,) * 5 if found is None else tuple(vars(found).values())
        return (case.title, case.stands_in, label, *means, *measured)


def _partition(result: Result) -> str:
    return str(getattr(result.request.config.data, "partition", ""))


def _shown(cell: object) -> str:
    return f"{cell:.2f}" if isinstance(cell, float) else str(cell)
