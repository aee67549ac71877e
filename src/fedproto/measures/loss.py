"""The loss that is minimised: of the aggregate model, over all clients' training data."""

from __future__ import annotations

from fedproto.measures.base import MEASURES, Measure
from fedproto.types import POOLED, ServerState

TRAINING_LOSS = "aggregate_train_loss"


@MEASURES.register("loss")
class TrainingLossMeasure(Measure):
    """Training loss of the aggregate model over all clients, as the paper's loss curves show it."""

    def take(self, state: ServerState) -> dict[str, float]:
        """The mean over all samples, which weighs clients by size; their own losses may differ."""
        train = self.probe.federation.train_indices(POOLED)
        (tally,) = self.probe.tallies(state, [train])
        return {} if tally is None else {TRAINING_LOSS: self.probe.task.metrics(tally)["loss"]}
