"""Strategies that the study of guidance compared with and that the product does not have.

FedRS (Li & Zhan 2021): restricted softmax, so that clients spare classes that they lack. FedLC
(Zhang et al. 2022): logits calibrated by the client's class frequencies.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from fedproto.options import option
from fedproto.strategies.base import OUT_OF_THE_SOFTMAX, STRATEGIES
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


@STRATEGIES.register("fedlc")
@dataclass(frozen=True)
class FedLC(FedAvg):
    """Subtracts ``τ · n_c^(−1/4)`` from the logit of class c while a client trains.

    Its calibrated cross-entropy: rare classes get a larger margin. For a class that the client
    lacks the paper's term has no value; taken: its limit, in which the class takes no part in the
    client's softmax.
    """

    statistics: ClassVar[Needs] = Needs(classes=True)

    tau: float = option(1.0, "strength τ of the calibration", at_least=0)

    def objective(self, local: Local) -> Objective:
        """The offsets per class."""
        if self.tau == 0:
            return Objective()
        margin = self.tau * local.classes.clamp(min=1).double().pow(-0.25)
        offset_c = torch.where(local.classes > 0, -margin, OUT_OF_THE_SOFTMAX)
        return Objective(offset=offset_c)
