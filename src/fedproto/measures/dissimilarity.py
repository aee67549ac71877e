"""Gradient dissimilarity over all clients, or an estimate from some of them."""

from __future__ import annotations

from fedproto.analysis.dissimilarity import summarize_distances
from fedproto.measures.base import MEASURES, Measure
from fedproto.rng import Purpose, stream
from fedproto.types import ServerState


@MEASURES.register("dissimilarity")
class DissimilarityMeasure(Measure):
    """Mean of ‖∇L_k − ∇L‖² over all clients; of a sample of them also its standard error."""

    def take(self, state: ServerState) -> dict[str, float]:
        """Other clients are drawn after every round, so that their errors do not add up."""
        total = len(self.probe.federation.clients)
        number = min(self.options.clients, total) or total
        clients = list(range(total))
        if number < total:
            draw = stream(self.seed, Purpose.MEASURED_CLIENTS, state.round)
            clients = sorted(int(client) for client in draw.permutation(total)[:number])
        found = summarize_distances(self.probe.gradient_distances(state, clients), total)
        metrics = {"dissimilarity": found.mean}
        if number < total:
            metrics["dissimilarity_error"] = found.error
        return metrics
