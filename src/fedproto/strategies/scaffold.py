"""SCAFFOLD (Karimireddy et al. 2020): control variates against the drift of clients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedproto.options import option
from fedproto.strategies.base import STRATEGIES, Strategy
from fedproto.strategies.values import Declarations, Local, Objective, Report, Seen, Setting
from fedproto.types import ClientUpdate, ServerState, Tensors, part, under

CONTROL = "control"


@STRATEGIES.register("scaffold")
@dataclass(frozen=True)
class Scaffold(Strategy):
    """Corrects every local step by the difference of the server's and the client's drift.

    Algorithm 1 with option II: a client's step follows ``g − c_k + c``, and afterwards
    ``c_k⁺ = c_k − c + (w_t − w_k) / (steps · lr)``, eq. (4); the server averages the weights of the
    cohort alike and takes ``c ← c + |S|/N · mean_k (c_k⁺ − c_k)``, eq. (5), with a global step of
    1 (others by the server's optimizer). The paper has all clients make the same number of steps;
    taken for stragglers: each its own. A client that made none keeps its ``c_k``. ``c_k⁺ − c_k`` is
    not sent: the server has the weights, the steps and c, so no client can tell another one.

    With `gamma` (Liu et al. 2025, FedMoSWA) the server averages the variates themselves,
    ``c ← c + γ · mean_k (c_k⁺ − c)``: clients that rarely take part do not hold it back. The server
    does not know ``c_k``, so clients then send ``c_k⁺``.
    """

    plain_sgd: ClassVar[bool] = True
    by_size: ClassVar[bool] = False
    partial_work: ClassVar[bool] = True

    gamma: float | None = option(
        None,
        "weight γ of a cohort in an averaged variate (FedMoSWA: 0.2); none: SCAFFOLD's own step",
        above=0,
        at_most=1,
    )

    def payload(self, setting: Setting, num_examples: int) -> Declarations:
        """The new ``c_k``, where the server averages them."""
        return {} if self.gamma is None else setting.like_params(CONTROL)

    def server_memory(self, setting: Setting) -> Declarations:
        """The server's control variate c, which clients get."""
        return setting.like_params(CONTROL, broadcast=True)

    def client_memory(self, setting: Setting) -> Declarations:
        """The client's own, c_k."""
        return setting.like_params(CONTROL)

    def objective(self, local: Local) -> Objective:
        """``⟨c − c_k, w⟩``, whose gradient is the correction."""
        server, own = part(CONTROL, local.broadcast), part(CONTROL, local.memory)
        return Objective(linear={name: server[name] - own[name] for name in own})

    def report(self, local: Local, trained: Tensors, before: Seen, after: Seen) -> Report:
        """The new ``c_k``, kept; its change the server knows from the weights."""
        server, own = part(CONTROL, local.broadcast), part(CONTROL, local.memory)
        steps = torch.as_tensor(local.steps)
        moved = _moved(local.params, trained, server, steps, local.lr)
        new = under(CONTROL, {name: own[name] + change for name, change in moved.items()})
        return Report({} if self.gamma is None else new, memory=new)

    def adds(
        self, state: ServerState, update: ClientUpdate, setting: Setting, cohort: int = 1
    ) -> Tensors:
        """The change of the client's ``c_k``, as one of all clients, or its part of the mean."""
        server, steps = part(CONTROL, state.memory), torch.as_tensor(update.steps)
        if self.gamma is not None:
            share, new = self.gamma / cohort, part(CONTROL, update.payload)
            return under(CONTROL, {name: share * (new[name] - c) for name, c in server.items()})
        moved = _moved(state.params, update.params, server, steps, update.lr)
        return under(CONTROL, {name: way / setting.num_clients for name, way in moved.items()})


def _moved(
    sent: Tensors, trained: Tensors, server: Tensors, steps: Tensor, lr: float | Tensor
) -> dict[str, Tensor]:
    """``c_k⁺ − c_k``; nothing where no step was made."""
    return {
        name: torch.where(steps > 0, (sent[name] - trained[name]) / steps.clamp(min=1) / lr - c, 0)
        for name, c in server.items()
    }
