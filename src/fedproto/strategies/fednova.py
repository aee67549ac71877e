"""FedNova (Wang et al. 2020): updates normalised by the number of local steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from fedproto.strategies.base import STRATEGIES
from fedproto.strategies.fedavg import FedAvg
from fedproto.types import ClientWeights, ServerState, Updates


@STRATEGIES.register("fednova")
@dataclass(frozen=True)
class FedNova(FedAvg):
    """Averages updates normalised by their number of steps, times the mean number of steps.

    Its normalised averaging for plain gradient descent, where a client's normaliser is its number
    of steps τ_k: ``w ← w_t − τ_eff Σ_k p_k (w_t − w_k) / τ_k`` with ``τ_eff = Σ_k p_k τ_k``. Here
    the p_k are the shares among the cohort, or equal ones.
    """

    plain_sgd: ClassVar[bool] = True
    partial_work: ClassVar[bool] = True

    def weigh(self, state: ServerState, updates: Updates) -> ClientWeights:
        """FedAvg's weights; each update is scaled by τ_eff / τ_k."""
        share_k = super().weigh(state, updates).client
        steps_k = torch.tensor([update.steps for update in updates], dtype=torch.float64)
        scale_k = (share_k * steps_k).sum() / steps_k.clamp(min=1)
        return ClientWeights(share_k, scale=scale_k)
