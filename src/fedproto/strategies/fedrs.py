"""FedRS (Li & Zhan 2021): restricted softmax, so that clients spare classes that they lack."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from fedproto.options import option
from fedproto.strategies.base import STRATEGIES
from fedproto.strategies.fedavg import FedAvg
from fedproto.strategies.values import Local, Needs, Objective


@STRATEGIES.register("fedrs")
@dataclass(frozen=True)
class FedRS(FedAvg):
    """Multiplies the logits of classes that a client lacks by a factor while it trains.

    Its restricted softmax: with a factor of 0 their rows of the head get no gradient, with 1 this
    is FedAvg. The paper's head has no bias; taken where there is one: the whole logit is
    multiplied.
    """

    statistics: ClassVar[Needs] = Needs(classes=True)

    scale: float = option(0.5, "factor on the logits of absent classes", at_least=0, at_most=1)

    def objective(self, local: Local) -> Objective:
        """1 for classes that the client holds, the factor for others."""
        scale_c = torch.where(local.classes > 0, 1.0, self.scale)
        return Objective(scale=scale_c)
