"""FedProto (Michieli & Ozay 2021): attention from how clients' prototypes moved.

Algorithm 1 of the paper: a client's part is `report`, from the statistics that the engine takes
before and after training; the server's part is `weigh` and `remember`; the averaging with the
attention is common to all strategies. (Not the FedProto of Tan et al.: see `fedprototan`.)
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedproto.equations import (
    aggregate_margin,
    aggregate_mean_margin,
    aggregate_prototypes,
    client_deviation,
    federated_attention,
    local_margin,
    minmax_normalize,
    normalize_attention,
    same_class_distance,
)
from fedproto.options import option
from fedproto.strategies.base import STRATEGIES, Strategy, size_weights
from fedproto.strategies.serve import prototypes_declared, reported_prototypes
from fedproto.strategies.values import Declarations, Declared, Local, Needs, Report, Seen, Setting
from fedproto.types import ClientWeights, Prototypes, ServerState, Tensors, Updates

SUM, COUNT, MARGIN = "prototypes/sum", "prototypes/count", "margins/local"
"""Names in payload and memory."""


@STRATEGIES.register("fedproto")
@dataclass(frozen=True)
class FedProto(Strategy):
    """Weighs clients by how their class prototypes moved: local and aggregate margins."""

    partial_work: ClassVar[bool] = True
    statistics: ClassVar[Needs] = Needs(
        before=frozenset({"features"}), after=frozenset({"features"})
    )

    margins: Literal["both", "local", "aggregate"] = option(
        "both", "margins that guide the attention: LPM and APM, LPM only, APM only"
    )
    measure: Literal["margin", "same-class-distance"] = option(
        "margin", "displacement of prototypes: the margin of eq. (7), or d⁺ of eq. (5) alone"
    )
    carry_unseen_prototypes: bool = option(
        False, "keep the last known prototype of a class that no client of the cohort holds"
    )

    def payload(self, setting: Setting, num_examples: int) -> Declarations:
        """Prototypes as sums and counts, and margins: 0 for classes that the client lacks."""
        channels, per_sample = setting.feature_sizes()
        low, high = -1.0, 1.0
        if self.measure == "same-class-distance":
            # Distances in the unit cube reach its diagonal, up to rounding.
            low, high = 0.0, math.sqrt(channels) * (1 + 1e-5)
        shape, dtype = (setting.num_classes,), setting.float_type
        margin = Declared(shape, dtype, low=low, high=high, zero_where=COUNT)
        reported = prototypes_declared(setting, num_examples * per_sample, SUM, COUNT)
        return {**reported, MARGIN: margin}

    def server_memory(self, setting: Setting) -> Declarations:
        """The aggregate prototypes of the round before."""
        classes, (channels, _) = setting.num_classes, setting.feature_sizes()
        return {
            SUM: Declared((classes, channels), torch.float64, initial=None),
            COUNT: Declared((classes,), torch.int64, initial=None),
        }

    def report(self, local: Local, trained: Tensors, before: Seen, after: Seen) -> Report:
        """The client's prototypes, eq. (4), and its LPM, eq. (8)."""
        assert before is not None  # noqa: S101 - declared in `statistics`
        assert after is not None  # noqa: S101
        if self.measure == "margin":
            margin_c = local_margin(before, after)
        else:
            margin_c = _same_class_only(before, minmax_normalize(after.mean), after.seen)
        return Report({SUM: after.sum, COUNT: after.count, MARGIN: margin_c})

    def weigh(self, state: ServerState, updates: Updates) -> ClientWeights:
        """The federated attention, eq. (13); by number of samples before the first prototypes."""
        if SUM not in state.memory:
            return ClientWeights(size_weights(updates))
        aggregate = _in_float64(Prototypes(state.memory[SUM], state.memory[COUNT]))
        attention: list[Tensor] = []
        if self.margins != "local":
            local = _in_float64(reported_prototypes(updates, SUM, COUNT))
            margin_kc = (
                aggregate_margin(local, aggregate)
                if self.measure == "margin"
                else _same_class_only(local, aggregate.mean, aggregate.seen)
            )
            attention.append(normalize_attention(client_deviation(margin_kc)))
        if self.margins != "aggregate":
            own_kc = torch.stack([update.payload[MARGIN] for update in updates]).double().cpu()
            attention.append(normalize_attention(client_deviation(own_kc)))
        both = len(attention) == 2
        return ClientWeights(federated_attention(*attention) if both else attention[0])

    def remember(self, state: ServerState, updates: Updates, setting: Setting) -> Tensors:
        """The aggregate prototypes of this round, eq. (10)."""
        new = aggregate_prototypes(_in_float64(reported_prototypes(updates, SUM, COUNT)))
        if self.carry_unseen_prototypes and SUM in state.memory:
            known = _in_float64(Prototypes(state.memory[SUM], state.memory[COUNT]))
            new = Prototypes(
                torch.where(new.seen.unsqueeze(-1), new.sum, known.sum),
                torch.where(new.seen, new.count, known.count),
            )
        return {SUM: new.sum, COUNT: new.count}

    def metrics(self, updates: Updates) -> dict[str, float]:
        """The cohort's AMM, eq. (15)."""
        pooled = reported_prototypes(updates, SUM, COUNT).merged()
        return {"aggregate_mean_margin": float(aggregate_mean_margin(pooled))}


def _same_class_only(local: Prototypes, reference_cd: Tensor, seen_c: Tensor) -> Tensor:
    """The ablation without ``d^-``: the distance itself in place of the margin.

    The paper calls this "using only d^+" and gives no formula. Taken literally: ``d^+`` replaces
    ``μ`` in eq. (11), so that a client whose prototypes moved further has a larger weight.
    """
    return same_class_distance(minmax_normalize(local.mean), reference_cd, local.seen, seen_c)


def _in_float64(prototypes: Prototypes) -> Prototypes:
    """The server computes margins in double precision, wherever the prototypes come from."""
    return Prototypes(prototypes.sum.double().cpu(), prototypes.count.cpu())
