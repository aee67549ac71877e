"""The recommended setting: equal weights, toleration, and guidance by classes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from fedproto.options import option
from fedproto.strategies.base import STRATEGIES
from fedproto.strategies.fedavg import FedAvg


@STRATEGIES.register("guided")
@dataclass(frozen=True)
class Guided(FedAvg):
    """FedAvg with the options that docs/guidance.md recommends; nothing needs to be chosen.

    Clients rehearse the classes that they lack. A model that cannot, because its scores are no
    function of its features alone, has its head averaged class by class instead.
    """

    head_instead: ClassVar[bool] = True

    tolerate_partial_work: bool = True
    weights: Literal["size", "uniform", "balanced"] = option(
        "uniform", "weigh a client by its number of samples, all alike, or for balanced classes"
    )
    rehearsal: float = 1.0
