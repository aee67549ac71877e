"""FedDyn (Acar et al. 2021): dynamic regularisation, so that local optima are global ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedproto.options import option
from fedproto.strategies.base import STRATEGIES, Strategy
from fedproto.strategies.values import Declarations, Local, Objective, Report, Seen, Setting
from fedproto.types import ClientUpdate, ServerState, Tensors, part, under

SLOPE, DRIFT = "slope", "drift"


@STRATEGIES.register("feddyn")
@dataclass(frozen=True)
class FedDyn(Strategy):
    """Regularises clients towards the received weights, corrected by their earlier gradients.

    Algorithm 1: a client minimises ``L_k(w) − ⟨g_k, w⟩ + α/2 ‖w − w_t‖²`` and then takes
    ``g_k ← g_k − α (w_k − w_t)``; the server takes ``h ← h − α/N Σ_k (w_k − w_t)`` over the cohort
    and ``w ← mean_k w_k − h/α``. The paper minimises exactly; taken: the usual local epochs, or
    those that a straggler finishes.
    """

    by_size: ClassVar[bool] = False
    partial_work: ClassVar[bool] = True

    alpha: float = option(0.1, "strength α of the regularisation", above=0)

    def server_memory(self, setting: Setting) -> Declarations:
        """h: the accumulated drift of all clients."""
        return setting.like_params(DRIFT)

    def client_memory(self, setting: Setting) -> Declarations:
        """g_k: the slope of the client's loss at its last weights."""
        return setting.like_params(SLOPE)

    def objective(self, local: Local) -> Objective:
        """The regularisation in closed form."""
        slope = part(SLOPE, local.memory)
        return Objective(self.alpha, linear={name: -one for name, one in slope.items()})

    def report(self, local: Local, trained: Tensors, before: Seen, after: Seen) -> Report:
        """Sends nothing, and keeps the new slope."""
        slope = {
            name: one - self.alpha * (trained[name] - local.params[name])
            for name, one in part(SLOPE, local.memory).items()
        }
        return Report(memory=under(SLOPE, slope))

    def adds(
        self, state: ServerState, update: ClientUpdate, setting: Setting, cohort: int = 1
    ) -> Tensors:
        """The client's part of h."""
        much = self.alpha / setting.num_clients
        drift = {name: much * (old - update.params[name]) for name, old in state.params.items()}
        return under(DRIFT, drift)

    def correct(self, combined: ServerState, setting: Setting) -> Tensors:
        """The combined weights less h/α."""
        drift = part(DRIFT, combined.memory)
        return {name: one - drift[name] / self.alpha for name, one in combined.params.items()}
