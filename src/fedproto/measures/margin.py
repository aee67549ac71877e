"""Aggregate mean margin (AMM), for every strategy in the same way."""

from __future__ import annotations

import math
from typing import ClassVar

from fedproto.equations import aggregate_mean_margin
from fedproto.measures.base import MEASURES, Measure
from fedproto.types import POOLED, ServerState

PER_CHANNEL = "margin_per_channel"
"""The margin divided by √D: as a root mean square over the channels it can be compared with that of
models of another width."""


@MEASURES.register("margin")
class MarginMeasure(Measure):
    """AMM of all clients' prototypes under the aggregate model; also divided by √D."""

    stands_for: ClassVar[frozenset[str]] = frozenset({"aggregate_mean_margin"})

    def take(self, state: ServerState) -> dict[str, float]:
        """All clients, not the cohort: curves then show the models and not the draw of clients."""
        train = self.probe.federation.train_indices(POOLED)
        prototypes = self.probe.prototypes(state, train)
        margin = float(aggregate_mean_margin(prototypes))
        channels = prototypes.sum.shape[-1]
        return {"aggregate_mean_margin": margin, PER_CHANNEL: margin / math.sqrt(channels)}
