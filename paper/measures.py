"""What the studies measure during training beside the product's measures."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from fedproto.measures import MEASURES, Measure
from fedproto.measures.scores import PER_CLASS, rounded, score_classes
from fedproto.models.adapter import adapted, class_rows
from fedproto.types import ServerState

MEASURE = "head"
ROW_NORM = "row norm"


@MEASURES.register(MEASURE)
class HeadMeasure(Measure):
    """The score of every class and the norm of its row of the last layer, as tables."""

    def take(self, state: ServerState) -> Mapping[str, Mapping[str, float]]:
        """Two tables, by class; rows where the model's last layer has one per class."""
        federation = self.probe.federation
        example, _ = federation.samples.batch(np.zeros(1, dtype=np.int64))
        module = self.probe.workload.model
        example = example.to(next(module.parameters()))
        model = adapted(module, example)
        names = class_rows(model, example, federation.num_classes)
        weights = [state.params[name] for name in names if state.params[name].dim() > 1]
        norms = weights[0].flatten(1).norm(dim=1).tolist() if weights else []
        named = {federation.class_name(index): norm for index, norm in enumerate(norms)}
        scores = score_classes(self.probe, state)
        return {PER_CLASS: rounded(scores), ROW_NORM: rounded(named)}
