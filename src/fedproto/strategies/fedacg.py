"""FedACG (Kim et al. 2024): clients start where the server's momentum leads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedproto.options import option
from fedproto.strategies.base import STRATEGIES, Strategy
from fedproto.strategies.values import Local, Objective


@STRATEGIES.register("fedacg")
@dataclass(frozen=True)
class FedACG(Strategy):
    """Nesterov's momentum on the server: broadcasts a look-ahead, and keeps clients near it.

    With ``Δ`` the mean of ``w_k − sent``: ``m ← λm + Δ``, ``θ ← sent + Δ``, and clients start the
    next round from ``sent = θ + λm``; θ is the model that is tested. λ is ``server.lookahead``,
    0.85 unless set there. Clients add ``μ/2 ‖w − sent‖²`` to their loss. No extra bytes are sent.
    The paper averages clients of equal size alike; taken for unequal ones: weights by size.
    """

    lookahead: ClassVar[float] = 0.85

    mu: float = option(1e-3, "strength μ of the proximal term", at_least=0)

    def objective(self, local: Local) -> Objective:
        """The proximal term around the look-ahead."""
        return Objective(proximal=self.mu)
