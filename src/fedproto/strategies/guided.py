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
    """FedAvg with the options that docs/guidance.md recommends; nothing needs to be chosen."""

    may_rehearse: ClassVar[bool] = True

    tolerate_partial_work: bool = option(
        True, "use the updates of clients that finish only part of their epochs"
    )
    weights: Literal["size", "uniform", "balanced"] = option(
        "uniform", "weigh a client by its number of samples, all alike, or for balanced classes"
    )
    head: Literal["average", "by-class"] = option(
        "by-class",
        "last layer: averaged like the rest, or its row of a class over the clients that hold it",
    )
