"""GHBM (Zaccone et al. 2025): heavy-ball momentum over several rounds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedproto.options import option
from fedproto.strategies.base import STRATEGIES, Strategy
from fedproto.strategies.values import Declarations, Declared, Local, Objective, Setting
from fedproto.types import ServerState, Tensors, Updates, part, under

PAST = "past"


@STRATEGIES.register("ghbm")
@dataclass(frozen=True)
class GHBM(Strategy):
    """Adds to every local gradient the direction of the server's last τ rounds.

    With ``m = (θ_{t−τ} − θ_t) / τ``, η the local learning rate and J the client's local steps, a
    local step follows ``g + β/(ηJ) · m``; a client's steps add up to ``−β m`` besides its
    gradients. τ is best about the inverse of the participation rate: the momentum then sees about
    every client once. FedCM (Xu et al. 2021) is τ = 1, up to a factor 1 − β on the gradient.

    The server sends ``θ_{t−τ}``, from which clients compute m: the same bytes as m. No momentum in
    the first τ rounds, as in the authors' code. Taken for unequal numbers of steps: each client its
    own J.
    """

    plain_sgd: ClassVar[bool] = True

    beta: float = option(0.9, "momentum β", at_least=0, at_most=1)
    tau: int = option(
        10, "rounds τ that the momentum spans; about clients / cohort", at_least=1, at_most=1000
    )

    def server_memory(self, setting: Setting) -> Declarations:
        """The last τ models; clients get the oldest."""
        declared: dict[str, Declared] = {}
        for age in range(1, self.tau + 1):
            last = age == self.tau
            declared |= setting.like_params(f"{PAST}/{age}", broadcast=last, initial=None)
        return declared

    def objective(self, local: Local) -> Objective:
        """``β/(ηJ) ⟨m, w⟩``, whose gradient is the momentum."""
        factor = self.beta / (local.lr * max(int(local.steps), 1) * self.tau)
        oldest = part(f"{PAST}/{self.tau}", local.broadcast)
        linear = {name: factor * (one - local.params[name]) for name, one in oldest.items()}
        return Objective(linear=linear or None)

    def remember(self, state: ServerState, updates: Updates, setting: Setting) -> Tensors:
        """Every model is a round older; the sent one is the newest."""
        kept = under(f"{PAST}/1", state.params)
        for age in range(1, self.tau):
            kept |= under(f"{PAST}/{age + 1}", part(f"{PAST}/{age}", state.memory))
        return kept
