"""FedDisco (Ye et al. 2023): clients whose classes are unbalanced count less."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from fedproto.options import option
from fedproto.strategies.base import STRATEGIES, Strategy, size_weights
from fedproto.strategies.contract import Declarations, Declared, Local, Needs, Report, Seen, Setting
from fedproto.types import ClientWeights, ServerState, Tensors, Updates

DISCREPANCY = "classes/discrepancy"


@STRATEGIES.register("feddisco")
@dataclass(frozen=True)
class FedDisco(Strategy):
    """Weighs a client by ``ReLU(n_k − a·d_k + b)``, its share of samples less its discrepancy.

    Its weights for aggregation, where d_k is the distance of the client's class shares from uniform
    ones. The paper allows any distance; taken: the Euclidean one, which the client itself computes
    and sends.
    """

    statistics: ClassVar[Needs] = Needs(classes=True)

    a: float = option(0.5, "what a unit of discrepancy costs", at_least=0)
    b: float = option(0.1, "what every client gets")

    def payload(self, setting: Setting, num_examples: int) -> Declarations:
        """The distance, at most that of a single class."""
        del num_examples
        farthest = (1 - 1 / setting.num_classes) ** 0.5
        return {DISCREPANCY: Declared((), torch.float64, low=0.0, high=farthest + 1e-9)}

    def report(self, local: Local, trained: Tensors, before: Seen, after: Seen) -> Report:
        """How far the client's classes are from balanced."""
        del trained, before, after
        share_c = local.classes / local.classes.sum().clamp(min=1).double()
        return Report({DISCREPANCY: (share_c - 1 / len(share_c)).square().sum().sqrt()})

    def weigh(self, state: ServerState, updates: Updates) -> ClientWeights:
        """By samples alone where nobody would have any weight."""
        del state
        size_k = size_weights(updates)
        discrepancy_k = torch.stack([update.payload[DISCREPANCY].cpu() for update in updates])
        weight_k = (size_k - self.a * discrepancy_k + self.b).relu()
        total = weight_k.sum()
        return ClientWeights(weight_k / total if total > 0 else size_k)
