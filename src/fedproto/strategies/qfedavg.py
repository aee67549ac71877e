"""q-FedAvg (Li et al. 2020, "Fair Resource Allocation"): clients with a high loss count more."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from fedproto.options import option
from fedproto.strategies.base import STRATEGIES, Strategy
from fedproto.strategies.values import Declarations, Declared, Local, Needs, Report, Seen, Setting
from fedproto.types import ClientWeights, ServerState, Tensors, Updates

LOSS = "loss/received"


@STRATEGIES.register("qfedavg")
@dataclass(frozen=True)
class QFedAvg(Strategy):
    """Raises clients by the q-th power of their loss F_k under the received model.

    Algorithm 2: with ``Δ_k = L (w_t − w_k)`` and ``h_k = q F_k^(q−1) ‖Δ_k‖² + L F_k^q`` the server
    takes ``w_t − Σ_k F_k^q Δ_k / Σ_k h_k``, where L = 1/lr. With q = 0 it is the plain mean.
    """

    statistics: ClassVar[Needs] = Needs(before=frozenset({"loss"}))

    q: float = option(
        1.0, "exponent of a client's loss in its weight; 0 for the plain mean", at_least=0
    )

    def payload(self, setting: Setting, num_examples: int) -> Declarations:
        """The client's loss under the received model."""
        return {LOSS: Declared((), setting.float_type, low=0.0)}

    def report(self, local: Local, trained: Tensors, before: Seen, after: Seen) -> Report:
        """The loss before training."""
        assert before is not None  # noqa: S101 - declared in `statistics`
        return Report({LOSS: before.loss})

    def weigh(self, state: ServerState, updates: Updates) -> ClientWeights:
        """Shares of ``F_k^q``, and the length of the common way."""
        loss_k = torch.stack([update.payload[LOSS].double().cpu() for update in updates])
        # No client is perfect: a loss of 0 would have no power below 0.
        loss_k = loss_k.clamp(min=1e-10)
        smooth_k = 1 / torch.tensor([update.lr for update in updates], dtype=torch.float64)
        square_k = torch.stack(
            [
                torch.stack(
                    [
                        (old - update.params[name]).double().square().sum().cpu()
                        for name, old in state.params.items()
                    ]
                ).sum()
                for update in updates
            ]
        )
        power_k = loss_k.pow(self.q)
        norm_k = self.q * loss_k.pow(self.q - 1) * smooth_k.square() * square_k + smooth_k * power_k
        share_k = power_k / power_k.sum()
        return ClientWeights(share_k, scale=float((smooth_k * power_k).sum() / norm_k.sum()))
