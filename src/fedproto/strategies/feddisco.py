"""FedDisco (Ye et al. 2023): clients with unbalanced classes have smaller weights."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch

from fedproto.options import option
from fedproto.strategies.base import STRATEGIES, Strategy, size_weights
from fedproto.strategies.values import Declarations, Declared, Local, Needs, Report, Seen, Setting
from fedproto.types import ClientWeights, ServerState, Tensors, Updates

DISCREPANCY = "classes/discrepancy"


@STRATEGIES.register("feddisco")
@dataclass(frozen=True)
class FedDisco(Strategy):
    """Weighs a client by ``ReLU(n_k − a·d_k + b)``, its share of samples less its discrepancy.

    d_k is the discrepancy of the client's class shares from uniform ones. The paper allows any; as
    the authors' code by default: the Kullback-Leibler divergence, divided by its sum over the
    cohort, so that a and b mean the same for any number of classes. The client computes and sends
    the divergence. Where all weights would be zero the code fails; taken: weights by samples.
    """

    statistics: ClassVar[Needs] = Needs(classes=True)

    a: float = option(0.5, "coefficient of a client's discrepancy in its weight", at_least=0)
    b: float = option(0.1, "constant that is added to every weight")

    def payload(self, setting: Setting, num_examples: int) -> Declarations:
        """The divergence, at most that of a single class."""
        largest = math.log(setting.num_classes)
        return {DISCREPANCY: Declared((), torch.float64, low=0.0, high=largest + 1e-9)}

    def report(self, local: Local, trained: Tensors, before: Seen, after: Seen) -> Report:
        """The divergence of the client's classes from balanced ones."""
        share_c = local.classes / local.classes.sum().clamp(min=1).double()
        divergence = torch.xlogy(share_c, share_c * len(share_c)).sum()
        return Report({DISCREPANCY: divergence.clamp(min=0)})

    def weigh(self, state: ServerState, updates: Updates) -> ClientWeights:
        """By samples alone where all weights would be zero."""
        size_k = size_weights(updates)
        discrepancy_k = torch.stack([update.payload[DISCREPANCY].cpu() for update in updates])
        total = discrepancy_k.sum()
        discrepancy_k = discrepancy_k / total if total > 0 else discrepancy_k
        weight_k = (size_k - self.a * discrepancy_k + self.b).relu()
        total = weight_k.sum()
        return ClientWeights(weight_k / total if total > 0 else size_k)
