"""FedDecorr (Shi et al. 2023): keeps the features' channels uncorrelated."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedproto.options import option
from fedproto.strategies.base import STRATEGIES, Strategy
from fedproto.strategies.values import Batch, Local

TINY = 1e-8
"""Added to variances, as in the authors' code: a channel may be constant in a batch."""


@STRATEGIES.register("feddecorr")
@dataclass(frozen=True)
class FedDecorr(Strategy):
    """Adds ``β/D² ‖K‖_F²`` with K the correlations of the D feature channels in a batch.

    Against dimensional collapse: K is the identity where channels are uncorrelated. This is the
    paper's formula with its β = 0.1. The authors' code leaves out the diagonal, whose gradient is
    0, and multiplies by about the batch size B: their β is ``β · (B − 1)²/B · D/(D − 1)`` here.
    A batch of one sample has no correlations and adds nothing. Channels are the inputs of the
    model's head, flattened.
    """

    beta: float = option(0.1, "weight β of the decorrelation term", at_least=0)

    def batch_term(self, local: Local, batch: Batch) -> Tensor:
        """The mean square of the correlations."""
        share_b1 = batch.weight.unsqueeze(-1)
        # Not a product alone: a sample that only fills up may have infinite features.
        x_bd = torch.where(share_b1 > 0, batch.features, 0)
        x_bd = x_bd - (share_b1 * x_bd).sum(dim=0)
        x_bd = x_bd / ((share_b1 * x_bd.square()).sum(dim=0) + TINY).sqrt()
        return self.beta * ((share_b1 * x_bd).t() @ x_bd).square().mean()
