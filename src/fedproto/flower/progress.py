"""Tells Flower's log how far a run is."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from fedproto.config import RunConfig
from fedproto.errors import printable
from fedproto.rounds import Watcher
from fedproto.types import RoundRecord

LOG = logging.getLogger("flwr")


class LogLines(Watcher):
    """One line a round, and one for every notice."""

    def notice(self, text: str) -> None:
        """Writes a warning."""
        LOG.warning("%s", printable(text))

    def round_done(self, config: RunConfig, records: Sequence[RoundRecord]) -> None:
        """Writes the round's scores and incidents."""
        record = records[-1]
        scores = ", ".join(f"{name} {value:.4f}" for name, value in record.metrics.items())
        LOG.info("%s round %d: %s", printable(config.title), record.round + 1, printable(scores))
        for client, reason in record.failures.items():
            LOG.warning("round %d, client %d: %s", record.round + 1, client, printable(reason))
        if record.note:
            LOG.warning("round %d: %s", record.round + 1, printable(record.note))
