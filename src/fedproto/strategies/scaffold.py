"""SCAFFOLD (Karimireddy et al. 2020): control variates against the drift of clients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from fedproto.strategies.base import STRATEGIES, Strategy, equal_weights
from fedproto.strategies.contract import Declarations, Local, Objective, Report, Seen, Setting
from fedproto.types import ClientWeights, ServerState, Tensors, Updates, part, under

CONTROL = "control"


@STRATEGIES.register("scaffold")
@dataclass(frozen=True)
class Scaffold(Strategy):
    """Corrects every local step by the difference of the server's and the client's drift.

    Algorithm 1 with option II: a client's step follows ``g − c_k + c``, and afterwards
    ``c_k⁺ = c_k − c + (w_t − w_k) / (steps · lr)``, eq. (4); the server averages the weights of the
    cohort alike and takes ``c ← c + |S|/N · mean_k (c_k⁺ − c_k)``, eq. (5), with a global step of
    1 (others by the server's optimizer). The paper has all clients make the same number of steps;
    taken for stragglers: each its own. A client that made none keeps its ``c_k``.
    """

    plain_sgd: ClassVar[bool] = True

    tolerate_partial_work: bool = True

    def server_memory(self, setting: Setting) -> Declarations:
        """The server's control variate c, which clients get."""
        return setting.like_params(CONTROL, broadcast=True)

    def client_memory(self, setting: Setting) -> Declarations:
        """The client's own, c_k."""
        return setting.like_params(CONTROL)

    def payload(self, setting: Setting, num_examples: int) -> Declarations:
        """How far c_k moved."""
        del num_examples
        return setting.like_params(CONTROL, way=True)

    def objective(self, local: Local) -> Objective:
        """``⟨c − c_k, w⟩``, whose gradient is the correction."""
        server, own = part(CONTROL, local.broadcast), part(CONTROL, local.memory)
        return Objective(linear={name: server[name] - own[name] for name in own})

    def report(self, local: Local, trained: Tensors, before: Seen, after: Seen) -> Report:
        """The new ``c_k``, kept, and its change, sent."""
        del before, after
        steps = torch.as_tensor(local.steps)
        moved = {}
        for name, server in part(CONTROL, local.broadcast).items():
            drift = (local.params[name] - trained[name]) / steps.clamp(min=1) / local.lr
            moved[name] = torch.where(steps > 0, drift - server, 0)
        own = part(CONTROL, local.memory)
        kept = {name: own[name] + way for name, way in moved.items()}
        return Report(under(CONTROL, moved), under(CONTROL, kept))

    def weigh(self, state: ServerState, updates: Updates) -> ClientWeights:
        """All clients alike."""
        del state
        return ClientWeights(equal_weights(updates))

    def remember(self, state: ServerState, updates: Updates, setting: Setting) -> Tensors:
        """The server's control variate moves by the cohort's share of all clients."""
        return {
            name: state.memory[name]
            + sum(update.payload[name] for update in updates) / setting.num_clients
            for name in setting.like_params(CONTROL)
        }
