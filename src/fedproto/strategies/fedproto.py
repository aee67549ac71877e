"""FedProto (Michieli & Ozay 2021): attention from how clients' prototypes moved.

Algorithm 1 of the paper is spread over three places: a client's part is in
`fedproto.engines.reference` (prototypes before and after training) with `summarize` below, the
server's part is `weigh` below, and the averaging with the attention is common to all strategies.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, TypeVar

import torch
from torch import Tensor

from fedproto.equations import (
    aggregate_margin,
    aggregate_prototypes,
    client_deviation,
    federated_attention,
    local_margin,
    minmax_normalize,
    normalize_attention,
    same_class_distance,
)
from fedproto.errors import TrainingError
from fedproto.options import option
from fedproto.strategies.attention import cap_attention, sharpened_attention
from fedproto.strategies.base import STRATEGIES, Strategy, size_weights
from fedproto.types import ClientUpdate, ClientWeights, Prototypes, ServerState

T = TypeVar("T")


@STRATEGIES.register("fedproto")
@dataclass(frozen=True)
class FedProto(Strategy):
    """Weighs clients by how their class prototypes moved: local and aggregate margins."""

    needs_prototypes: ClassVar[bool] = True

    tolerate_partial_work: bool = option(
        True, "use the updates of clients that finish only part of their epochs"
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

    def summarize(self, before: Prototypes, after: Prototypes) -> Tensor | None:
        """The client's LPM, eq. (8)."""
        if self.measure == "margin":
            return local_margin(before, after)
        return _same_class_only(before, minmax_normalize(after.mean), after.seen)

    def margin_bounds(self, channels: int) -> tuple[float, float]:
        """[−1, 1] for margins; distances in the unit cube reach its diagonal ``√D``."""
        if self.measure == "margin":
            return -1.0, 1.0
        return 0.0, math.sqrt(channels)

    def weigh(self, state: ServerState, updates: Sequence[ClientUpdate]) -> ClientWeights:
        """The federated attention, eq. (13); by number of samples while there is no reference."""
        attention_k = self._attention(state, updates)
        if self.max_attention is not None:
            attention_k = cap_attention(attention_k, self.max_attention)
        return ClientWeights(attention_k)

    def _attention(self, state: ServerState, updates: Sequence[ClientUpdate]) -> Tensor:
        if state.prototypes is None:
            return size_weights(updates)
        if self.margins == "local":
            return self._local_attention(updates)
        if self.margins == "aggregate":
            return self._aggregate_attention(updates, state.prototypes)
        return federated_attention(
            self._aggregate_attention(updates, state.prototypes), self._local_attention(updates)
        )

    def next_prototypes(
        self, state: ServerState, updates: Sequence[ClientUpdate]
    ) -> Prototypes | None:
        """The aggregate prototypes of this round, eq. (10)."""
        aggregate = aggregate_prototypes(_stacked_prototypes(updates))
        if not self.carry_unseen_prototypes or state.prototypes is None:
            return aggregate
        known_c = aggregate.seen
        return Prototypes(
            torch.where(known_c.unsqueeze(-1), aggregate.sum, state.prototypes.sum),
            torch.where(known_c, aggregate.count, state.prototypes.count),
        )

    def _local_attention(self, updates: Sequence[ClientUpdate]) -> Tensor:
        margin_kc = torch.stack(
            [_given(update.local_margin, update, "margins") for update in updates]
        )
        return self._attention_from(margin_kc.double().cpu())

    def _aggregate_attention(
        self, updates: Sequence[ClientUpdate], aggregate: Prototypes
    ) -> Tensor:
        local, aggregate = _stacked_prototypes(updates), _in_float64(aggregate)
        if self.measure == "margin":
            margin_kc = aggregate_margin(local, aggregate)
        else:
            margin_kc = _same_class_only(local, aggregate.mean, aggregate.seen)
        return self._attention_from(margin_kc)

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


def _stacked_prototypes(updates: Sequence[ClientUpdate]) -> Prototypes:
    stacked = Prototypes.stack(
        [_given(update.prototypes, update, "prototypes") for update in updates]
    )
    return _in_float64(stacked)


def _in_float64(prototypes: Prototypes) -> Prototypes:
    """The server computes margins in double precision, wherever the prototypes come from."""
    return Prototypes(prototypes.sum.double().cpu(), prototypes.count.cpu())


def _given(value: T | None, update: ClientUpdate, what: str) -> T:
    if value is None:
        raise TrainingError(
            f"client {update.client} sent no {what}; FedProto needs them from every client"
        )
    return value
