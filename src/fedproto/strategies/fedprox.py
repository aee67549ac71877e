"""FedProx (Li et al. 2020): FedAvg that tolerates partial work, with a proximal term."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedproto.options import option
from fedproto.strategies.base import STRATEGIES, Strategy
from fedproto.strategies.values import Local, Objective


@STRATEGIES.register("fedprox")
@dataclass(frozen=True)
class FedProx(Strategy):
    """Keeps clients near the received weights: adds μ/2 ‖w − w^t‖² to the local loss."""

    partial_work: ClassVar[bool] = True

    mu: float = option(0.1, "strength μ of the proximal term", at_least=0)

    def objective(self, local: Local) -> Objective:
        """The proximal term; with μ = 0 this is FedAvg bit for bit."""
        return Objective(proximal=self.mu)
