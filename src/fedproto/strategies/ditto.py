"""Ditto (Li et al. 2021): beside the shared model every client trains one of its own."""

from __future__ import annotations

from dataclasses import dataclass

from fedproto.options import option
from fedproto.strategies.base import STRATEGIES, Strategy
from fedproto.strategies.fedprox import FedProx


@STRATEGIES.register("ditto")
@dataclass(frozen=True)
class Ditto(Strategy):
    """The shared model is FedAvg's; the personal one ``v_k`` stays near it.

    A client trains ``v_k`` on ``L_k(v) + λ/2 ‖v − w_t‖²`` with ``w_t`` the received model, from
    where it stood after the client's last round, and from ``w_t`` in its first. The paper leaves
    the number of personal steps open; taken: the batches, optimizer and learning rate of the
    shared model's local training. ``v_k`` never leaves the client.
    """

    strength: float = option(
        0.1, "strength λ of the proximal term towards the shared model", at_least=0
    )

    @property
    def personal_method(self) -> Strategy:
        """FedProx, whose term keeps the personal model near the received one."""
        return FedProx(mu=self.strength)
