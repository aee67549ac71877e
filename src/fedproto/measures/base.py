"""The interface of measures: numbers from an aggregate model for the round's record."""

from __future__ import annotations

import abc
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, TypeAlias

from fedproto.analysis.probe import Probe
from fedproto.engines.base import Workload
from fedproto.errors import ConfigError, TrainingError
from fedproto.measures import MEASURES, MeasureOptions
from fedproto.types import ServerState

__all__ = ["MEASURES", "ComparingMeasure", "Gauge", "Measure", "Taken"]

ReadState: TypeAlias = Callable[[str], ServerState]
"""Gives the last state of the run in a directory."""


class Measure(abc.ABC):
    """A measure of aggregate models.

    Attributes:
        stands_for: Metrics that a strategy computes from a cohort and this measure from all
            clients: the two are not mixed in one record.
    """

    stands_for: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, probe: Probe, options: MeasureOptions, seed: int) -> None:
        self.probe = probe
        self.options = options
        self.seed = seed

    @abc.abstractmethod
    def take(self, state: ServerState) -> Mapping[str, float | Mapping[str, float]]:
        """The numbers by the names they have in a record's metrics, or in tables of it."""


class ComparingMeasure(Measure):
    """A measure that compares with the last state of another run, ``measure.reference``."""

    @abc.abstractmethod
    def compare_with(self, reference: ServerState) -> None:
        """Receives the model to compare with, before anything is measured."""


@dataclass(frozen=True)
class Taken:
    """The measured numbers of a state."""

    metrics: dict[str, float] = field(default_factory=dict)
    tables: dict[str, dict[str, float]] = field(default_factory=dict)


class Gauge:
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
                reason = str(error).splitlines()[0] if str(error) else type(error).__name__
                raise TrainingError(
                    f"measure '{name}' after round {state.round} failed: {reason}; leave it out of"
                    " measure.what, or use smaller batches (engine.eval_batch_size)"
                ) from error
            for key, value in found.items():
                if isinstance(value, Mapping):
                    taken.tables[key] = _finite(value)
                else:
                    taken.metrics.update(_finite({key: value}))
        return taken

    def prepared(self, options: MeasureOptions, seed: int) -> list[Measure]:
        """The measures with their reference: what can fail before any training."""
        key = options, seed
        if key not in self._measures:
            probe = self._probe = self._probe or Probe(self._workload)
            found = [MEASURES.get(name)(probe, options, seed) for name in options.what]
            for name, measure in zip(options.what, found, strict=True):
                if isinstance(measure, ComparingMeasure):
                    if options.reference is None or self._read_state is None:
                        raise ConfigError(
                            f"measure '{name}' needs measure.reference, the directory of a finished"
                            " run of strategy 'centralized' on the same data"
                        )
                    measure.compare_with(self._read_state(options.reference).to(probe.device))
            self._measures[key] = found
        return self._measures[key]


def _finite(numbers: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in numbers.items() if math.isfinite(value)}
