"""FedLC (Zhang et al. 2022): logits calibrated by the client's class frequencies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from fedproto.options import option
from fedproto.strategies.base import STRATEGIES
from fedproto.strategies.fedavg import FedAvg
from fedproto.strategies.values import Local, Needs, Objective

OUT_OF_THE_SOFTMAX = -1e4
"""Added to a logit, this leaves nothing of its class in any floating type."""


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
