"""FedLC (Zhang et al. 2022): scores calibrated by how often a client sees each class."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from fedproto.options import option
from fedproto.strategies.base import STRATEGIES
from fedproto.strategies.contract import Local, Looks, Objective
from fedproto.strategies.fedavg import FedAvg

OUT_OF_THE_SOFTMAX = -1e4
"""Added to a score, this leaves nothing of its class in any floating type."""


@STRATEGIES.register("fedlc")
@dataclass(frozen=True)
class FedLC(FedAvg):
    """Subtracts ``τ · n_c^(−1/4)`` from the score of class c while a client trains.

    Its calibrated cross-entropy: rare classes get a larger margin. For a class that the client
    lacks the paper's term has no value; taken: its limit, in which the class takes no part in the
    client's softmax.
    """

    tau: float = option(1.0, "strength τ of the calibration", at_least=0)

    @property
    def looks(self) -> Looks:
        """The classes."""
        return super().looks | Looks(classes=True)

    def objective(self, local: Local) -> Objective:
        """The offsets per class."""
        if self.tau == 0:
            return super().objective(local)
        margin = self.tau * local.classes.clamp(min=1).double().pow(-0.25)
        offset_c = torch.where(local.classes > 0, -margin, OUT_OF_THE_SOFTMAX)
        return replace(super().objective(local), offset=offset_c)
