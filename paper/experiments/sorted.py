"""The claim that sorting and partitioning by class gives the same results as α = 0.01."""

from __future__ import annotations

from collections.abc import Sequence

from fedproto.config import RunConfig
from paper.base import EXPERIMENTS, FoundRun, FoundRuns
from paper.cases import FAIR_AND_TOLERANT, SEGMENTATION, Case, Scope
from paper.experiments.claims import Claim, Claims
from paper.library import Request

ALPHA, WITHIN = 0.01, 1.0
"""The concentration that the claim is about, and what counts as the same, in points of mIoU."""


@EXPERIMENTS.register("sorted")
class SortedAgainstDirichlet(Claims):
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

    def stated(self) -> Sequence[Claim]:
        """The same for every method."""
        return [
            Claim(
                f"{label}: the same",
                "miou",
                label,
                label,
                "level",
                within=WITHIN,
                factor=100.0,
                cases=SEGMENTATION,
            )
            for label in ("FedAvg", "FedProto", FAIR_AND_TOLERANT)
        ]

    def sides(
        self, claim: Claim, case: Case, results: FoundRuns
    ) -> tuple[Sequence[FoundRun], Sequence[FoundRun]]:
        """Runs of one method under both partitions."""
        runs = results.select(case.name, claim.of)
        other = [each for each in runs if not _is_sorted(each)]
        return [each for each in runs if _is_sorted(each)], other


def _is_sorted(result: FoundRun) -> bool:
    return getattr(result.request.config.data, "partition", "") == "sorted"
