"""FedProx (Li et al. 2020): FedAvg that tolerates partial work, with a proximal term."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedproto.options import option
from fedproto.strategies.base import STRATEGIES, Strategy
from fedproto.types import Tensors


@STRATEGIES.register("fedprox")
@dataclass(frozen=True)
class FedProx(Strategy):
    """Keeps clients near the received weights: adds μ/2 ‖w − w^t‖² to the local loss."""

    tolerate_partial_work: bool = option(
        True, "use the updates of clients that finish only part of their epochs"
    )
    mu: float = option(0.1, "strength μ of the proximal term", at_least=0)

    def penalty(self, params: Tensors, received: Tensors) -> Tensor | None:
        """The proximal term; None for μ = 0, which then is FedAvg bit for bit."""
        if self.mu == 0:
            return None
        squares = [(params[name] - received[name]).square().sum() for name in params]
        return self.mu / 2 * torch.stack(squares).sum()
