"""Curves of stored runs in TensorBoard."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from fedproto.callback import Callback
from fedproto.config import RunConfig
from fedproto.errors import ConfigError, install
from fedproto.store.run import RunStore
from fedproto.types import RoundRecord

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


def check_installed() -> None:
    """Raises a `ConfigError` where the package is missing."""
    if importlib.util.find_spec("tensorboard") is None:
        raise ConfigError(f"--tensorboard: the package is missing; {install('tensorboard')}")


class TensorBoard(Callback):
    """Writes event files, for `tensorboard --logdir`, in ``tensorboard/`` of each run directory.

    They are rewritten from the run's records whenever it is trained: a run that continues after
    a kill, or that began without them, has every round once.
    """

    def __init__(self, stores: Sequence[RunStore]) -> None:
        self._stores = stores
        self._writers: dict[RunStore, SummaryWriter] = {}
        for store in stores:
            if store.finished:
                _begun(store).close()

    def on_round(self, config: RunConfig, record: RoundRecord) -> None:
        """Adds the round; all rounds of a run that is new here."""
        for store in self._stores:
            if store.config is not config:
                continue
            if store in self._writers:
                _add(self._writers[store], record)
            else:
                self._writers[store] = _begun(store)

    def on_end(self) -> None:
        """Writes what is still in memory."""
        for writer in self._writers.values():
            writer.close()


def _begun(store: RunStore) -> SummaryWriter:
    """New event files with the rounds on record."""
    from torch.utils.tensorboard import SummaryWriter

    folder = store.folder.make("tensorboard")
    for old in folder.glob("events.out.tfevents.*"):
        old.unlink()
    writer = SummaryWriter(str(folder))
    described = json.dumps(store.config.to_dict(), indent=2)
    writer.add_text("configuration", f"```\n{described}\n```")
    for record in store.records():
        _add(writer, record)
    return writer


def _add(writer: SummaryWriter, record: RoundRecord) -> None:
    step = record.round + 1
    for name in ("bytes_up", "bytes_down", "seconds"):
        writer.add_scalar(f"round/{name}", getattr(record, name), step)
    for name, value in record.metrics.items():
        writer.add_scalar(name, value, step)
    if len(record.attention) > 1:
        writer.add_histogram("attention", np.array([*record.attention.values()]), step)
