"""For whom a model is good: its score on every client's own test part, and class by class."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from fedproto.analysis.scores import score_classes, score_clients
from fedproto.measures.base import MEASURES, Measure
from fedproto.types import ServerState

PER_CLIENT, PER_CLASS = "client", "class"
DIGITS = 5
CLIENT_SCORES = {
    "mean_client_": "mean client",
    "worst_tenth_": "worst tenth",
    "at_zero_": "at zero",
}
"""What is said of the clients' scores: beginnings of metrics, each followed by the score's name."""


def summarize_clients(values: Sequence[float]) -> tuple[float, float, float]:
    """The mean over clients, the mean of their worst tenth, and the share that scores zero."""
    scores = np.sort(np.asarray(values, dtype=np.float64))
    worst = scores[: max(1, -(-len(scores) // 10))]
    return float(scores.mean()), float(worst.mean()), float((scores == 0).mean())


@MEASURES.register("clients")
class ClientsMeasure(Measure):
    """The score of every client and class as tables, with mean, worst tenth and share at zero.

    Taken at the end of every run, and every few rounds where a run asks for it.
    """

    def take(self, state: ServerState) -> Mapping[str, float | Mapping[str, float]]:
        """Three metrics and two tables; nothing where nobody has test samples."""
        clients = score_clients(self.probe, state)
        if not clients.values:
            return {}
        summary = zip(CLIENT_SCORES, summarize_clients(clients.values), strict=True)
        return {
            **{prefix + clients.metric: value for prefix, value in summary},
            PER_CLIENT: clients.rounded(DIGITS),
            PER_CLASS: score_classes(self.probe, state).rounded(DIGITS),
        }
