"""Measures of aggregate models, taken every few rounds while they are trained.

Here are only the options, so that a configuration can name measures without importing them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fedproto.options import Options, Registry, option

if TYPE_CHECKING:
    from fedproto.measures.base import Measure

MEASURES: Registry[Measure] = Registry("measure", "fedproto.measures")


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
