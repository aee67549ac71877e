"""FedProto (Michieli & Ozay 2021): attention from how clients' prototypes moved.

Algorithm 1 of the paper is spread over three places: a client's part is `report` below, from what
`fedproto.engines.reference` looks up before and after training; the server's part is `weigh` and
`remember` below; and the averaging with the attention is common to all strategies.
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
from fedproto.strategies.attention import sharpened_attention
from fedproto.strategies.base import STRATEGIES, size_weights
from fedproto.strategies.contract import Declarations, Declared, Local, Looks, Report, Seen, Setting
from fedproto.strategies.guidance import FEATURES, Guidance
from fedproto.strategies.prototypes import feature_sizes, merged_prototypes, prototypes_declared
from fedproto.strategies.rules import cap_attention
from fedproto.types import ClientUpdate, ClientWeights, Prototypes, ServerState, Tensors, Updates

SUM, COUNT, MARGIN = "prototypes/sum", "prototypes/count", "margins/local"
"""Names in payload and memory."""


@STRATEGIES.register("fedproto")
@dataclass(frozen=True)
class FedProto(Guidance):
    """Weighs clients by how their class prototypes moved: local and aggregate margins."""

    has_margins: ClassVar[bool] = True

    tolerate_partial_work: bool = True
    weights: Literal["margins", "balanced"] = option(
        "margins", "attention from the margins, or so that the cohort's classes are balanced"
    )
    margins: Literal["both", "local", "aggregate"] = option(
        "both", "which margins guide the attention: LPM and APM, LPM only, APM only"
    )
    measure: Literal["margin", "same-class-distance"] = option(
        "margin", "displacement of prototypes: the margin of eq. (7), or d⁺ of eq. (5) alone"
    )
    carry_unseen_prototypes: bool = option(
        False, "keep the last known prototype of a class that nobody in the cohort held"
    )
    sharpness: float | None = option(
        None,
        "attention as a softmax of standardised margins, this many times; 0 is uniform, below 0"
        " reversed; none for the paper's",
    )
    max_attention: float | None = option(
        None, "no client's attention exceeds this share, or an equal one", above=0, at_most=1
    )

    @property
    def balances(self) -> bool:
        """Whether clients are weighed so that classes are balanced."""
        return self.weights == "balanced"

    @property
    def _sends_prototypes(self) -> bool:
        """Those under the trained models are sent anyway."""
        return self.rehearsed != "received"

    @property
    def looks(self) -> Looks:
        """Features before and after training."""
        return super().looks | Looks(before=FEATURES, after=FEATURES)

    def payload(self, setting: Setting, num_examples: int) -> Declarations:
        """Prototypes as sums and counts, and margins: 0 for classes that the client lacks."""
        classes, channels, _ = feature_sizes(setting, num_examples)
        low, high = -1.0, 1.0
        if self.measure == "same-class-distance":
            # Distances in the unit cube reach its diagonal, up to rounding.
            low, high = 0.0, math.sqrt(channels) * (1 + 1e-5)
        margin = Declared((classes,), setting.float_type, low=low, high=high, zero_where=COUNT)
        return {
            **super().payload(setting, num_examples),
            **prototypes_declared(setting, num_examples, SUM, COUNT),
            MARGIN: margin,
        }

    def server_memory(self, setting: Setting) -> Declarations:
        """The aggregate prototypes of the round before."""
        classes, channels, _ = feature_sizes(setting, 0)
        return {
            **super().server_memory(setting),
            SUM: Declared((classes, channels), torch.float64, initial=None),
            COUNT: Declared((classes,), torch.int64, initial=None),
        }

    def report(self, local: Local, trained: Tensors, before: Seen, after: Seen) -> Report:
        """The client's prototypes, eq. (4), and its LPM, eq. (8)."""
        told = super().report(local, trained, before, after).payload
        assert before is not None  # noqa: S101 - asked for in `looks`
        assert after is not None  # noqa: S101
        old, new = (Prototypes(seen.sums, seen.count) for seen in (before, after))
        if self.measure == "margin":
            margin_c = local_margin(old, new)
        else:
            margin_c = _same_class_only(old, minmax_normalize(new.mean), new.seen)
        return Report({**told, SUM: new.sum, COUNT: new.count, MARGIN: margin_c})

    def weigh(self, state: ServerState, updates: Updates) -> ClientWeights:
        """The federated attention, eq. (13); by number of samples while there is no reference."""
        attention_k = self.balanced(updates) if self.balances else self._attention(state, updates)
        if self.max_attention is not None:
            attention_k = cap_attention(attention_k, self.max_attention)
        return ClientWeights(attention_k)

    def _attention(self, state: ServerState, updates: Updates) -> Tensor:
        margins = self._margins(state, updates)
        if margins is None:
            return size_weights(updates)
        attention = [self._attention_from(margin_kc) for margin_kc in margins]
        return federated_attention(*attention) if len(attention) == 2 else attention[0]

    def class_scores(self, state: ServerState, updates: Updates, weights: ClientWeights) -> Tensor:
        """Also by margins: what eq. (11) makes of a client's sum of them, ``σ(μ_k[c])``.

        The mean of two where both are used; by the clients' weights while there is no reference.
        """
        margins = self._margins(state, updates) if self.head_weights == "margins" else None
        if margins is None:
            return super().class_scores(state, updates, weights)
        return torch.stack(margins).sigmoid().mean(dim=0)

    def rehearsable(self, updates: Updates) -> Prototypes:
        """The cohort's prototypes to rehearse, merged; not normalised as those of eq. (10) are."""
        if self._sends_prototypes:
            return merged_prototypes(updates, SUM, COUNT)
        return super().rehearsable(updates)

    def remember(self, state: ServerState, updates: Updates, setting: Setting) -> Tensors:
        """The aggregate prototypes of this round, eq. (10)."""
        rehearsed = super().remember(state, updates, setting)
        aggregate, known = aggregate_prototypes(_stacked_prototypes(updates)), _remembered(state)
        if self.carry_unseen_prototypes and known is not None:
            seen_c = aggregate.seen
            aggregate = Prototypes(
                torch.where(seen_c.unsqueeze(-1), aggregate.sum, known.sum),
                torch.where(seen_c, aggregate.count, known.count),
            )
        return {**rehearsed, SUM: aggregate.sum, COUNT: aggregate.count}

    def metrics(self, updates: Updates) -> dict[str, float]:
        """The cohort's AMM, eq. (15)."""
        merged = Prototypes.stack([_prototypes_of(update) for update in updates]).merged()
        return {"aggregate_mean_margin": float(aggregate_mean_margin(merged))}

    def _margins(self, state: ServerState, updates: Updates) -> list[Tensor] | None:
        """The margins that guide, each ``[K, C]``; None while there are no aggregate prototypes."""
        aggregate, local = _remembered(state), _stacked_prototypes(updates)
        if aggregate is None:
            return None
        found = []
        if self.margins != "local":
            found.append(
                aggregate_margin(local, aggregate)
                if self.measure == "margin"
                else _same_class_only(local, aggregate.mean, aggregate.seen)
            )
        if self.margins != "aggregate":
            own_kc = torch.stack([update.payload[MARGIN] for update in updates])
            found.append(own_kc.double().cpu())
        return found

    def _attention_from(self, margin_kc: Tensor) -> Tensor:
        if self.sharpness is not None:
            return sharpened_attention(margin_kc, self.sharpness)
        return normalize_attention(client_deviation(margin_kc))


def _same_class_only(local: Prototypes, reference_cd: Tensor, seen_c: Tensor) -> Tensor:
    """The ablation without ``d^-``: the distance itself stands where the margin stood.

    The paper calls this "using only d^+" and gives no formula. Taken literally: ``d^+`` replaces
    ``μ`` in eq. (11), so that a client whose prototypes moved further counts more.
    """
    return same_class_distance(minmax_normalize(local.mean), reference_cd, local.seen, seen_c)


def _remembered(state: ServerState) -> Prototypes | None:
    if SUM not in state.memory:
        return None
    return _in_float64(Prototypes(state.memory[SUM], state.memory[COUNT]))


def _prototypes_of(update: ClientUpdate) -> Prototypes:
    return Prototypes(update.payload[SUM], update.payload[COUNT])


def _stacked_prototypes(updates: Updates) -> Prototypes:
    return _in_float64(Prototypes.stack([_prototypes_of(update) for update in updates]))


def _in_float64(prototypes: Prototypes) -> Prototypes:
    """The server computes margins in double precision, wherever the prototypes come from."""
    return Prototypes(prototypes.sum.double().cpu(), prototypes.count.cpu())
