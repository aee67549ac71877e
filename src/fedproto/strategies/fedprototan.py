"""FedProto of Tan et al. (2022): features drawn to the global prototype of their class."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch

from fedproto.options import option
from fedproto.strategies.base import STRATEGIES, Strategy
from fedproto.strategies.fedproto import COUNT, SUM
from fedproto.strategies.serve import prototypes_declared, reported_prototypes
from fedproto.strategies.values import Batch, Declarations, Local, Needs, Report, Seen, Setting
from fedproto.types import Prototypes, ServerState, Tensors, Updates


@STRATEGIES.register("fedprototan")
@dataclass(frozen=True)
class FedProtoTan(Strategy):
    """Adds ``λ/D ‖f − P_y‖²`` for a sample's D features f and the prototype P of its class y.

    ``P_c`` is the mean feature of class c over the last cohort's samples, under the models trained
    there. The paper pulls a client's mean features; taken: each sample's, as in its code. It shares
    prototypes alone, ``weights = "personal"``: the server's model never moves. Default: both.
    """

    statistics: ClassVar[Needs] = Needs(after=frozenset({"features"}))
    strength: float = option(1.0, "weight λ of the distance to the prototypes", at_least=0)
    weights: Literal["average", "personal"] = option(
        "average", "models: averaged as in FedAvg, or each client keeps its own"
    )

    def personal(self, setting: Setting) -> tuple[str, ...]:
        """The whole model, or nothing."""
        return tuple(setting.params) if self.weights == "personal" else ()

    def payload(self, setting: Setting, num_examples: int) -> Declarations:
        """The client's prototypes as sums and counts."""
        return prototypes_declared(setting, num_examples, SUM, COUNT)

    def server_memory(self, setting: Setting) -> Declarations:
        """The global prototypes, which clients get."""
        declared = self.payload(setting, 2**53).items()
        return {name: replace(one, broadcast=True) for name, one in declared}

    def batch_term(self, local: Local, batch: Batch) -> torch.Tensor:
        """The mean distance; 0 for samples whose class has no prototype."""
        known = Prototypes(local.broadcast[SUM], local.broadcast[COUNT])
        apart_b = (batch.features - known.mean[batch.targets]).square().mean(dim=-1)
        return self.strength * batch.mean(torch.where(known.seen[batch.targets], apart_b, 0))

    def report(self, local: Local, trained: Tensors, before: Seen, after: Seen) -> Report:
        """The prototypes under the trained model."""
        return Report({SUM: after.sum, COUNT: after.count} if after else {})

    def remember(self, state: ServerState, updates: Updates, setting: Setting) -> Tensors:
        """The cohort's merged prototypes."""
        merged = reported_prototypes(updates, SUM, COUNT).merged()
        return {SUM: merged.sum, COUNT: merged.count}
