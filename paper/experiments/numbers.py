"""Every number that the paper prints, beside ours, in one table."""

from __future__ import annotations

from collections.abc import Iterator

from paper.base import EXPERIMENTS, FoundRuns
from paper.cases import CLASSIFICATION, SEGMENTATION, Scope
from paper.comparison import Comparison, ComparisonTable, show
from paper.library import Request, merged
from paper.output import Output

TABLES = ("data", "accuracy", "ablation", "margins", "segmentation")


@EXPERIMENTS.register("numbers")
class Numbers(ComparisonTable):
    """Tables 1 to 4 and the centralised mIoU, with the distance in the paper's own spread."""

    title = "Every number of the paper"
    cases = CLASSIFICATION + SEGMENTATION

    def requests(self, scope: Scope) -> list[Request]:
        """What all tables want."""
        return merged(each for table in _tables(scope) for each in table.requests(scope))

    def rows(self, scope: Scope, results: FoundRuns, output: Output) -> list[Comparison]:
        """Those of all tables that the paper has a figure for."""
        return [
            row
            for table in _tables(scope)
            for row in table.rows(scope, results, output)
            if row.paper is not None
        ]

    def render(self, scope: Scope, results: FoundRuns, output: Output) -> None:
        """The table, and how near it comes on the whole."""
        rows = self.rows(scope, results, output)
        show(output, "numbers", self.title, rows)
        measured = [row.distance for row in rows if row.distance is not None]
        within = sum(abs(distance) <= 1 for distance in measured)
        output.say(
            f"{len(rows)} numbers, {sum(row.ours is not None for row in rows)} measured here;"
            f" of {len(measured)} with a spread in the paper {within} lie within it"
        )


def _tables(scope: Scope) -> Iterator[ComparisonTable]:
    for name in TABLES:
        table = EXPERIMENTS.get(name)()
        if isinstance(table, ComparisonTable) and scope.cases(table.cases):
            yield table
