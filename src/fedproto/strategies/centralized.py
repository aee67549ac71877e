"""Centralised training: the reference line that a federation is measured against."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedproto.strategies.base import STRATEGIES, Strategy


@STRATEGIES.register("centralized")
@dataclass(frozen=True)
class Centralized(Strategy):
    """Trains one model on the pooled training data of all clients.

    Each round makes as many steps as the cohort of that round would make with all its epochs, so
    that its curve shares the x-axis with federated runs. Nobody straggles and nothing is sent.
    """

    pooled: ClassVar[bool] = True
