"""What a sink is, and the watcher that feeds sinks without letting them stop a run.

A sink is given every round of a run exactly once, those before it was asked for included: a run
that goes on after a kill, or that began without the sink, ends with the same log as any other.
"""

from __future__ import annotations

import abc
import importlib.util
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import ClassVar

from fedproto.config import RunConfig
from fedproto.errors import ConfigError, install
from fedproto.options import Registry
from fedproto.rounds import Watcher
from fedproto.store import RunStore
from fedproto.types import RoundRecord


class Sink(abc.ABC):
    """One run's log in some service.

    A subclass says what it needs installed, begins or continues the log when it is made, and may
    fail in any way: the run then goes on without it.

    Attributes:
        package: What it needs.
        extra: The extra of this package that installs it.
    """

    package: ClassVar[str] = ""
    extra: ClassVar[str]

    def __init__(self, store: RunStore) -> None:
        self.store = store

    @classmethod
    def available(cls) -> bool:
        """Whether what it needs is installed."""
        return not cls.package or importlib.util.find_spec(cls.package) is not None

    @abc.abstractmethod
    def write(self, record: RoundRecord) -> None:
        """Takes in a round; called in order, from the first round on."""

    @abc.abstractmethod
    def close(self) -> None:
        """Ends the log for now."""


SINKS: Registry[Sink] = Registry("sink", "fedproto.store.sinks")


@contextmanager
def logging_to(
    names: Sequence[str], stores: Sequence[RunStore], watcher: Watcher
) -> Iterator[Watcher]:
    """Adds sinks to a watcher while runs go on.

    Runs that are over are logged when the others are; the watcher is also told of sinks that fail.
    """
    kinds = check_sinks(names)
    if not kinds:
        yield watcher
        return
    logging = _Logging(kinds, stores, watcher)
    try:
        yield logging
        logging.catch_up()
    finally:
        logging.close()


def check_sinks(names: Sequence[str]) -> dict[str, type[Sink]]:
    """The sinks of some names, if all of them can be used here."""
    kinds = {name: SINKS.get(name) for name in names}
    for name, kind in kinds.items():
        if not kind.available():
            raise ConfigError(
                f"--log-to {name} needs a package that is missing: {install(kind.extra)}"
            )
    return kinds


def scalars(record: RoundRecord) -> dict[str, float]:
    """A round's numbers by the names that services show."""
    return {
        **record.metrics,
        "round/bytes_up": record.bytes_up,
        "round/bytes_down": record.bytes_down,
        "round/seconds": record.seconds,
    }


class _Logging(Watcher):
    def __init__(
        self, kinds: dict[str, type[Sink]], stores: Sequence[RunStore], watcher: Watcher
    ) -> None:
        super().__init__(watcher)
        self._kinds = kinds
        self._waiting = list(stores)
        self._open: list[tuple[RunStore, dict[str, Sink]]] = []

    def round_done(self, config: RunConfig, records: Sequence[RoundRecord]) -> None:
        super().round_done(config, records)
        for store, sinks in self._open:
            if store.config is config:
                self._write(sinks, records[-1:])
                return
        for store in self._waiting:
            if store.config is config:
                self._begin(store, records)
                return

    def catch_up(self) -> None:
        """Logs the runs that were over before."""
        for store in list(self._waiting):
            self._begin(store, store.records())

    def close(self) -> None:
        for _, sinks in self._open:
            for name, sink in list(sinks.items()):
                with self._guarded(name, sinks):
                    sink.close()

    def _begin(self, store: RunStore, records: Sequence[RoundRecord]) -> None:
        self._waiting.remove(store)
        sinks: dict[str, Sink] = {}
        self._open.append((store, sinks))
        for name, kind in list(self._kinds.items()):
            with self._guarded(name, sinks):
                sinks[name] = kind(store)
            if name not in sinks:  # a service that cannot be reached keeps nobody waiting twice
                del self._kinds[name]
        self._write(sinks, records)

    def _write(self, sinks: dict[str, Sink], records: Sequence[RoundRecord]) -> None:
        for name, sink in list(sinks.items()):
            with self._guarded(name, sinks):
                for record in records:
                    sink.write(record)

    @contextmanager
    def _guarded(self, name: str, sinks: dict[str, Sink]) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # noqa: BLE001 - whatever a service does, the run goes on
            sinks.pop(name, None)
            reason = str(error).partition("\n")[0] or type(error).__name__
            self.notice(
                f"{name} failed ({reason}); the run goes on without it, and its log can be"
                " completed by 'fedproto resume' with the same --log-to"
            )
