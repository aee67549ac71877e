"""The interface of measures: numbers from an aggregate model for the round's record."""

from __future__ import annotations

import abc
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, TypeAlias

from fedproto.engines.base import Workload
from fedproto.errors import ConfigError, TrainingError, reason_of
from fedproto.measures.probe import Probe
from fedproto.options import Options, Registry, option
from fedproto.types import ServerState

ReadState: TypeAlias = Callable[[str], ServerState]
"""Gives the last state of the run in a directory."""


@dataclass(frozen=True)
class MeasureOptions(Options):
    """Measures of aggregate models during training; they do not change the training."""

    every: int = option(
        0,
        "rounds between measurements, and after the last one; 0 for never (clients are scored at"
        " the end of every run)",
        at_least=0,
    )
    what: tuple[str, ...] = option(
        ("dissimilarity", "margin"),
        "names of the measures; `fedproto list measures` shows them",
    )
    reference: str | None = option(
        None, "mmd: directory of a finished run of strategy 'centralized' on the same data"
    )
    samples: int = option(1000, "mmd: maximum number of feature vectors per client", at_least=2)

    def due(self, round_: int, rounds: int) -> bool:
        """Whether to measure after this round, of this number in all."""
        return self.every > 0 and (round_ % self.every == 0 or round_ == rounds)

    def takes(self, name: str) -> bool:
        """Whether a measure is switched on."""
        return self.every > 0 and name in self.what


class Measure(abc.ABC):
    """A measure of aggregate models.

    Attributes:
        stands_for: Metrics that a strategy computes from a cohort and this measure from all
            clients: the two are not mixed in one record.
        read_state: Reads what the options name as ``measure.reference``; None where nothing can.
    """

    stands_for: ClassVar[frozenset[str]] = frozenset()

    def __init__(
        self, probe: Probe, options: MeasureOptions, seed: int, read_state: ReadState | None = None
    ) -> None:
        self.probe = probe
        self.options = options
        self.seed = seed
        self.read_state = read_state

    @abc.abstractmethod
    def take(self, state: ServerState) -> Mapping[str, float | Mapping[str, float]]:
        """The numbers by the names they have in a record's metrics, or in tables of it."""

    def reference(self) -> ServerState:
        """The last state of the run to compare with, ``measure.reference``."""
        if self.options.reference is None or self.read_state is None:
            raise ConfigError(
                f"measure '{MEASURES.name_of(type(self))}' needs measure.reference, the directory"
                " of a finished run of strategy 'centralized' on the same data"
            )
        return self.read_state(self.options.reference).to(self.probe.device)


MEASURES: Registry[Measure] = Registry("measure", "fedproto.measures")


@dataclass(frozen=True)
class Taken:
    """The measured numbers of a state."""

    metrics: dict[str, float] = field(default_factory=dict)
    tables: dict[str, dict[str, float]] = field(default_factory=dict)


class Meter:
    """Computes the measures that runs configure; one for all runs that train together.

    `read_state` reads what runs name as ``measure.reference``.
    """

    def __init__(self, workload: Workload, read_state: ReadState | None = None) -> None:
        self._workload = workload
        self._read_state = read_state
        self._probe: Probe | None = None
        self._measures: dict[tuple[MeasureOptions, int], list[Measure]] = {}

    def take(self, options: MeasureOptions, seed: int, state: ServerState) -> Taken:
        """All configured measures; values that are not finite are left out."""
        taken = Taken()
        for name, measure in zip(options.what, self.prepared(options, seed), strict=True):
            try:
                found = measure.take(state)
            except RuntimeError as error:
                raise TrainingError(
                    f"measure '{name}' after round {state.round} failed: {reason_of(error)}; leave"
                    " it out of measure.what, or use smaller batches (engine.eval_batch_size)"
                ) from error
            for key, value in found.items():
                if isinstance(value, Mapping):
                    taken.tables[key] = finite(value)
                else:
                    taken.metrics.update(finite({key: value}))
        return taken

    def prepared(self, options: MeasureOptions, seed: int) -> list[Measure]:
        """The measures with their reference: what can fail before any training."""
        key = options, seed
        if key not in self._measures:
            probe = self._probe = self._probe or Probe(self._workload)
            self._measures[key] = [
                MEASURES.get(name)(probe, options, seed, self._read_state) for name in options.what
            ]
        return self._measures[key]


def finite(numbers: Mapping[str, float]) -> dict[str, float]:
    """The numbers that are finite."""
    return {name: value for name, value in numbers.items() if math.isfinite(value)}
