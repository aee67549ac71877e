"""Aggregate mean margin (AMM), for every strategy in the same way."""

from __future__ import annotations

from typing import ClassVar

from fedproto.equations import aggregate_mean_margin
from fedproto.measures.base import MEASURES, Measure
from fedproto.types import POOLED, ServerState


@MEASURES.register("margin")
class MarginMeasure(Measure):
    """AMM of the prototypes of all clients' training data under the aggregate model."""

    stands_for: ClassVar[frozenset[str]] = frozenset({"aggregate_mean_margin"})

    def take(self, state: ServerState) -> dict[str, float]:
        """All clients, not the cohort: curves then show the models and not the draw of clients."""
        train = self.probe.federation.train_indices(POOLED)
        margin = aggregate_mean_margin(self.probe.prototypes(state, train))
        return {"aggregate_mean_margin": float(margin)}
