"""Metrics for Weights & Biases, one W&B run per run directory.

Which W&B run it is, and how far it is, stands in ``wandb.json`` beside the run's records. A W&B run
takes steps in ascending order only, so what was logged before a kill is not sent again: the rounds
done anew have the same values. Project, account and offline mode are set as W&B reads them
(``WANDB_PROJECT``, ``WANDB_MODE``, …).
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import uuid
from typing import Any

from fedproto.disk.files import content
from fedproto.store import RunStore
from fedproto.store.sinks.base import SINKS, Sink, scalars
from fedproto.types import RoundRecord

_FILE = "wandb.json"


@SINKS.register("wandb")
class WeightsAndBiases(Sink):
    """A run on W&B's site, or in its offline folder."""

    package = "wandb"
    install = "pip install 'fedproto[wandb]'"

    def __init__(self, store: RunStore) -> None:
        super().__init__(store)
        known = json.loads(content(store.path / _FILE) or b"{}")
        store.folder.make("wandb")
        self._id = str(known.get("id") or uuid.uuid4().hex[:16])
        self._run: Any = importlib.import_module("wandb").init(
            id=self._id,
            resume="allow",
            name=f"{store.config.title} seed {store.config.seed}",
            group=store.path.parent.resolve().name,
            config=store.config.to_dict(),
            dir=str(store.path),
            reinit="create_new",
        )
        # The site may know of more steps than this folder, and the other way round when offline.
        self._logged = max(int(known.get("logged", 0)), int(self._run.step) - 1)
        self._remember()

    def write(self, record: RoundRecord) -> None:
        """Sends a round, unless it was sent before."""
        step = record.round + 1
        if step > self._logged:
            self._run.log(scalars(record), step=step)
            self._logged = step
            self._remember()

    def close(self) -> None:
        """Ends the W&B run for now."""
        self._run.finish()

    def _remember(self) -> None:
        known = json.dumps({"id": self._id, "logged": self._logged})
        self.store.folder.write(_FILE, known.encode() + b"\n")
