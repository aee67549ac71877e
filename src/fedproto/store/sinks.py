"""Services that show the metrics of stored runs: TensorBoard, Weights & Biases.

A service gets every round of a run exactly once, rounds before it was asked for included: a run
that continues after a kill, or that began without the service, ends with the same log.
"""

from __future__ import annotations

import abc
import importlib
import importlib.util
import json
import uuid
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from fedproto.callback import Callback
from fedproto.config import RunConfig
from fedproto.disk.files import content
from fedproto.errors import ConfigError, install, reason_of
from fedproto.options import Registry
from fedproto.store.run import RunStore
from fedproto.types import RoundRecord


class Sink(abc.ABC):
    """The log of one run in a service; it is begun or continued when the sink is made.

    Attributes:
        package: The required package; also the name of the extra that installs it.
    """

    package: ClassVar[str] = ""

    def __init__(self, store: RunStore) -> None:
        self.store = store

    @classmethod
    def available(cls) -> bool:
        """Whether its package is installed."""
        return not cls.package or importlib.util.find_spec(cls.package) is not None

    @abc.abstractmethod
    def write(self, record: RoundRecord) -> None:
        """Takes in a round; called in order, from the first round on."""

    @abc.abstractmethod
    def close(self) -> None:
        """Ends the log for now."""


SINKS: Registry[Sink] = Registry("sink", "fedproto.store.sinks")


def check_sinks(names: Sequence[str]) -> None:
    """Checks that some sinks can be used here."""
    for name in names:
        kind = SINKS.get(name)
        if not kind.available():
            raise ConfigError(
                f"--log-to {name} needs a package that is missing: {install(kind.package)}"
            )


class SinkCallback(Callback):
    """Sends the rounds of stored runs to a sink.

    A sink that fails does not stop the runs; `notices` receives the error.
    """

    def __init__(self, name: str, stores: Sequence[RunStore], notices: Callback) -> None:
        self._name, self._kind, self._notices = name, SINKS.get(name), notices
        self._sinks: dict[RunStore, Sink | None] = dict.fromkeys(stores)  # None: not begun yet

    def on_round(self, config: RunConfig, record: RoundRecord) -> None:
        """Logs the round; of a run that is new here, all its rounds."""
        for store in list(self._sinks):
            if store.config is config:
                self._log(store, [record])

    def on_end(self) -> None:
        """Logs runs that were finished before, and ends all logs."""
        for store in list(self._sinks):
            self._log(store, [], last=True)

    def _log(self, store: RunStore, records: Sequence[RoundRecord], *, last: bool = False) -> None:
        if store not in self._sinks:
            return
        try:
            sink = self._sinks[store]
            if sink is None:
                sink = self._sinks[store] = self._kind(store)
                records = store.records()
            for record in records:
                sink.write(record)
            if last:
                sink.close()
        except Exception as error:  # noqa: BLE001 - no error of a service stops a run
            if self._sinks.pop(store) is None:  # one that cannot be reached is not tried again
                self._sinks = {known: one for known, one in self._sinks.items() if one is not None}
            self._notices.on_notice(
                f"{self._name} failed ({reason_of(error)}); the run continues without it, and its"
                " log can be completed by 'fedproto resume' with the same --log-to"
            )


def scalars(record: RoundRecord) -> dict[str, float]:
    """A round's numbers by the names that services show."""
    return {
        **record.metrics,
        "round/bytes_up": record.bytes_up,
        "round/bytes_down": record.bytes_down,
        "round/seconds": record.seconds,
    }


@SINKS.register("tensorboard")
class TensorBoard(Sink):
    """Event files that `tensorboard --logdir` shows.

    In ``tensorboard/`` inside the run directory; rewritten from the run's records whenever
    training continues, so that no round is in it twice and none is missing.
    """

    package = "tensorboard"

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
        """Adds a round: every metric, bytes, seconds, and the distribution of attention."""
        step = record.round + 1
        for name, value in scalars(record).items():
            self._writer.add_scalar(name, value, step)
        if len(record.attention) > 1:
            self._writer.add_histogram("attention", np.array([*record.attention.values()]), step)

    def close(self) -> None:
        """Writes what is still in memory."""
        self._writer.close()


@SINKS.register("wandb")
class WeightsAndBiases(Sink):
    """A run on W&B's site, or in its offline folder.

    ``wandb.json`` beside the run's records names the W&B run and its last step. W&B takes
    steps in ascending order alone, so rounds logged before a kill are not sent again; repeated,
    they have the same values. Project, account and offline mode are set as W&B reads them
    (``WANDB_PROJECT``, ``WANDB_MODE``, …).
    """

    package = "wandb"

    def __init__(self, store: RunStore) -> None:
        super().__init__(store)
        known = json.loads(content(store.path / "wandb.json") or b"{}")
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
        self.store.folder.write("wandb.json", known.encode() + b"\n")
