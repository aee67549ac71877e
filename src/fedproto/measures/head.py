"""Class by class: how well a model knows each, and how long its row of the last layer is."""

from __future__ import annotations

from collections.abc import Mapping

from fedproto.analysis.scores import score_classes
from fedproto.measures.base import MEASURES, Measure
from fedproto.measures.clients import DIGITS, PER_CLASS
from fedproto.types import ServerState

ROW_NORM = "row norm"


@MEASURES.register("head")
class HeadMeasure(Measure):
    """The score of every class and the norm of its row of the last layer, as tables."""

    def take(self, state: ServerState) -> Mapping[str, float | Mapping[str, float]]:
        """Two tables, by class; rows where the model's last layer has one per class."""
        scores, norms = score_classes(self.probe, state), self.probe.row_norms(state)
        named = {
            self.probe.federation.class_name(index): round(norm, DIGITS)
            for index, norm in enumerate([] if norms is None else norms.tolist())
        }
        return {PER_CLASS: scores.rounded(DIGITS), ROW_NORM: named}
