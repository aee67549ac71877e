"""FedNTD (Lee et al. 2022): distils the received model's logits of the other classes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedproto.options import option
from fedproto.strategies.base import OUT_OF_THE_SOFTMAX, STRATEGIES, Strategy
from fedproto.strategies.values import Batch, Local, Needs

RECEIVED = "received"


@STRATEGIES.register("fedntd")
@dataclass(frozen=True)
class FedNTD(Strategy):
    """Adds ``β · KL(q ‖ p)`` over the classes other than the true one ("not-true distillation").

    p and q are the softmax of the logits divided by τ, without the logit of the true class, of the
    model in training and of the received one. Defaults β = τ = 1 as in the authors' configuration;
    like their code, and unlike other distillation, the term is not multiplied by τ².
    """

    statistics: ClassVar[Needs] = Needs(frozen=(RECEIVED,))

    beta: float = option(1.0, "weight β of the distillation", at_least=0)
    tau: float = option(1.0, "temperature τ of both softmaxes", above=0)

    def batch_term(self, local: Local, batch: Batch) -> Tensor:
        """The mean divergence over the batch."""
        class_c = torch.arange(batch.logits.shape[-1], device=batch.targets.device)
        true_bc = batch.targets.unsqueeze(-1) == class_c

        def log_softmax(logits_bc: Tensor) -> Tensor:
            return torch.where(true_bc, OUT_OF_THE_SOFTMAX, logits_bc / self.tau).log_softmax(-1)

        ours_bc, theirs_bc = log_softmax(batch.logits), log_softmax(batch.frozen[RECEIVED].logits)
        divergence_b = (theirs_bc.exp() * (theirs_bc - ours_bc)).sum(dim=-1)
        return self.beta * batch.mean(divergence_b)
