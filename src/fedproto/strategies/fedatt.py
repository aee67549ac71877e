"""FedAtt (Ji et al. 2019): attention from the distance between weights, tensor by tensor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from fedproto.options import option
from fedproto.strategies.base import STRATEGIES, Strategy
from fedproto.types import ClientWeights, ServerState, Updates


@STRATEGIES.register("fedatt")
@dataclass(frozen=True)
class FedAtt(Strategy):
    """Weighs clients, tensor by tensor, by the distance that their weights moved.

    Each tensor w moves to ``w − ε Σ_k α_k (w − w_k)`` with ``α = softmax_k ‖w − w_k‖₂``, which is a
    weighted average of updates multiplied by ε. The norm is Frobenius' as in the paper; the
    authors' script takes the spectral norm of matrices. The original's differential-privacy
    noise is left out, as in the comparison of the paper implemented here.
    """

    weighs_tensors: ClassVar[bool] = True

    epsilon: float = option(1.2, "server step ε", above=0)

    def weigh(self, state: ServerState, updates: Updates) -> ClientWeights:
        """Attention per tensor; a client's own weight is its mean over the tensors."""
        attention = {}
        for name, old in state.params.items():
            distance_k = torch.stack([(update.params[name] - old).norm() for update in updates])
            attention[name] = torch.softmax(distance_k.double(), dim=0).cpu()
        mean = torch.stack(list(attention.values())).mean(dim=0)
        return ClientWeights(mean, attention, scale=self.epsilon)
