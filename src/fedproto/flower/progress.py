"""Tells Flower's log how far a run is."""

from __future__ import annotations

import logging

from fedproto.rounds import Watcher
from fedproto.rounds.runs import Run
from fedproto.types import RoundRecord

LOG = logging.getLogger("flwr")


class LogLines(Watcher):
    """One line a round, and one for every notice."""

    def notice(self, text: str) -> None:
        """Writes a warning."""
        LOG.warning("%s", text)

    def round_done(self, run: Run, record: RoundRecord) -> None:
        """Writes the round's scores and incidents."""
        scores = ", ".join(f"{name} {value:.4f}" for name, value in record.metrics.items())
        LOG.info("%s round %d: %s", run.config.title, record.round + 1, scores)
        for client, reason in record.failures.items():
            LOG.warning("round %d, client %d: %s", record.round + 1, client, reason)
        if record.note:
            LOG.warning("round %d: %s", record.round + 1, record.note)
