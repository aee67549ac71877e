"""FedRS (Li & Zhan 2021): restricted softmax, so that clients spare classes that they lack."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from fedproto.options import option
from fedproto.strategies.base import STRATEGIES
from fedproto.strategies.contract import Local, Looks, Objective
from fedproto.strategies.fedavg import FedAvg


@STRATEGIES.register("fedrs")
@dataclass(frozen=True)
class FedRS(FedAvg):
    """Multiplies the scores of classes that a client lacks by a factor while it trains.

    Its restricted softmax: with a factor of 0 their rows of the head get no gradient, with 1 this
    is FedAvg. The paper's head has no bias; taken where there is one: the whole score is
    multiplied.
    """

    scale: float = option(0.5, "factor on the scores of absent classes", at_least=0, at_most=1)

    @property
    def looks(self) -> Looks:
        """The classes."""
        return super().looks | Looks(classes=True)

    def objective(self, local: Local) -> Objective:
        """1 for classes that the client holds, the factor for others."""
        scale_c = torch.where(local.classes > 0, 1.0, self.scale)
        return replace(super().objective(local), scale=scale_c)
