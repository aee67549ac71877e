"""Metrics for TensorBoard, in ``tensorboard/`` inside the run directory.

The log is written anew from the run's records whenever training goes on, so that no round is in it
twice and none is missing.
"""

from __future__ import annotations

import json

import numpy as np

from fedproto.store import RunStore
from fedproto.store.sinks.base import SINKS, Sink, scalars
from fedproto.types import RoundRecord


@SINKS.register("tensorboard")
class TensorBoard(Sink):
    """Event files that `tensorboard --logdir` shows."""

    package = "tensorboard"
    install = "pip install 'fedproto[tensorboard]'"

    def __init__(self, store: RunStore) -> None:
        from torch.utils.tensorboard import SummaryWriter

        super().__init__(store)
        folder = store.folder.make("tensorboard")
        for old in folder.glob("events.out.tfevents.*"):
            old.unlink()
        self._writer = SummaryWriter(str(folder))
        described = json.dumps(store.config.to_dict(), indent=2)
        self._writer.add_text("configuration", f"```\n{described}\n```")

    def write(self, record: RoundRecord) -> None:
        """Adds a round: every metric, bytes, seconds, and how attention is spread."""
        step = record.round + 1
        for name, value in scalars(record).items():
            self._writer.add_scalar(name, value, step)
        if len(record.attention) > 1:
            self._writer.add_histogram("attention", np.array([*record.attention.values()]), step)

    def close(self) -> None:
        """Writes what is still in memory."""
        self._writer.close()
