"""For whom a model is good: its score on every client's own test part, and class by class."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from fedproto.analysis.scores import score_classes, score_clients
from fedproto.measures.base import MEASURES, Measure
from fedproto.types import ServerState

PER_CLIENT, PER_CLASS = "client", "class"
DIGITS = 5


@MEASURES.register("clients")
class ClientsMeasure(Measure):
    """The score of every client and class as tables of the record, and how clients fare in two."""

    def take(self, state: ServerState) -> Mapping[str, float | Mapping[str, float]]:
        """Mean over clients, the score that a tenth of them are below, and the tables."""
        clients = score_clients(self.probe, state)
        classes = score_classes(self.probe, state)
        if not clients.values:
            return {}
        return {
            f"mean_client_{clients.metric}": float(np.mean(clients.values)),
            f"tenth_client_{clients.metric}": float(np.quantile(clients.values, 0.1)),
            PER_CLIENT: clients.rounded(DIGITS),
            PER_CLASS: classes.rounded(DIGITS),
        }
