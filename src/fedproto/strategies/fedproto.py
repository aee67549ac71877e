"""FedProto (Michieli & Ozay 2021): attention from how clients' prototypes moved.

Algorithm 1 of the paper is spread over three places: a client's part is `report` below, from what
`fedproto.engines.reference` looks up before and after training; the server's part is `weigh` and
`remember` below; and the averaging with the attention is common to all strategies.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
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
from fedproto.errors import TrainingError
from fedproto.options import option
from fedproto.strategies.attention import sharpened_attention
from fedproto.strategies.base import STRATEGIES, Strategy, size_weights
from fedproto.strategies.contract import (
    Declarations,
    Declared,
    Local,
    Looks,
    Observation,
    Report,
    Setting,
)
from fedproto.strategies.rules import cap_attention
from fedproto.types import ClientUpdate, ClientWeights, Prototypes, ServerState, Tensors

SUM, COUNT, MARGIN = "prototypes/sum", "prototypes/count", "margins/local"
"""Names in payload and memory."""


@STRATEGIES.register("fedproto")
@dataclass(frozen=True)
class FedProto(Strategy):
    """Weighs clients by how their class prototypes moved: local and aggregate margins."""

    looks: ClassVar[Looks] = Looks(before=frozenset({"features"}), after=frozenset({"features"}))

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

    def payload(self, setting: Setting, num_examples: int) -> Declarations:
        """Prototypes as sums and counts, and margins: 0 for classes that the client lacks."""
        classes, channels, vectors = _feature_sizes(setting, num_examples)
        low, high = -1.0, 1.0
        if self.measure == "same-class-distance":
            # Distances in the unit cube reach its diagonal, up to rounding.
            low, high = 0.0, math.sqrt(channels) * (1 + 1e-5)
        number = setting.float_type
        return {
            SUM: Declared((classes, channels), number, zero_where=COUNT),
            COUNT: Declared((classes,), torch.int64, low=0, high=vectors, total=vectors),
            MARGIN: Declared((classes,), number, low=low, high=high, zero_where=COUNT),
        }

    def server_memory(self, setting: Setting) -> Declarations:
        """The aggregate prototypes of the round before."""
        classes, channels, _ = _feature_sizes(setting, 0)
        return {
            SUM: Declared((classes, channels), torch.float64, initial=None),
            COUNT: Declared((classes,), torch.int64, initial=None),
        }

    def report(
        self,
        local: Local,
        trained: Tensors,
        before: Observation | None,
        after: Observation | None,
    ) -> Report:
        """The client's prototypes, eq. (4), and its LPM, eq. (8)."""
        del local, trained
        assert before is not None  # noqa: S101 - asked for in `looks`
        assert after is not None  # noqa: S101
        old, new = (Prototypes(seen.sums, seen.count) for seen in (before, after))
        if self.measure == "margin":
            margin_c = local_margin(old, new)
        else:
            margin_c = _same_class_only(old, minmax_normalize(new.mean), new.seen)
        return Report({SUM: new.sum, COUNT: new.count, MARGIN: margin_c})

    def weigh(self, state: ServerState, updates: Sequence[ClientUpdate]) -> ClientWeights:
        """The federated attention, eq. (13); by number of samples while there is no reference."""
        attention_k = self._attention(state, updates)
        if self.max_attention is not None:
            attention_k = cap_attention(attention_k, self.max_attention)
        return ClientWeights(attention_k)

    def _attention(self, state: ServerState, updates: Sequence[ClientUpdate]) -> Tensor:
        aggregate = _remembered(state)
        if aggregate is None:
            return size_weights(updates)
        if self.margins == "local":
            return self._local_attention(updates)
        if self.margins == "aggregate":
            return self._aggregate_attention(updates, aggregate)
        return federated_attention(
            self._aggregate_attention(updates, aggregate), self._local_attention(updates)
        )

    def remember(
        self, state: ServerState, updates: Sequence[ClientUpdate], setting: Setting
    ) -> Tensors:
        """The aggregate prototypes of this round, eq. (10)."""
        del setting
        aggregate, known = aggregate_prototypes(_stacked_prototypes(updates)), _remembered(state)
        if self.carry_unseen_prototypes and known is not None:
            seen_c = aggregate.seen
            aggregate = Prototypes(
                torch.where(seen_c.unsqueeze(-1), aggregate.sum, known.sum),
                torch.where(seen_c, aggregate.count, known.count),
            )
        return {SUM: aggregate.sum, COUNT: aggregate.count}

    def metrics(self, updates: Sequence[ClientUpdate]) -> dict[str, float]:
        """The cohort's AMM, eq. (15)."""
        merged = Prototypes.stack([_prototypes_of(update) for update in updates]).merged()
        return {"aggregate_mean_margin": float(aggregate_mean_margin(merged))}

    def _local_attention(self, updates: Sequence[ClientUpdate]) -> Tensor:
        margin_kc = torch.stack([update.payload[MARGIN] for update in updates])
        return self._attention_from(margin_kc.double().cpu())

    def _aggregate_attention(
        self, updates: Sequence[ClientUpdate], aggregate: Prototypes
    ) -> Tensor:
        local = _stacked_prototypes(updates)
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


def _feature_sizes(setting: Setting, num_examples: int) -> tuple[int, int, int]:
    """Classes, channels, and feature vectors that so many samples give."""
    features = setting.features
    if features is None:
        raise TrainingError(
            "FedProto needs to know the shape of the model's features, and the model could not"
            " tell: its features(x) must take a batch of one input"
        )
    return setting.num_classes, features.channels, num_examples * features.per_sample


def _remembered(state: ServerState) -> Prototypes | None:
    if SUM not in state.memory:
        return None
    return _in_float64(Prototypes(state.memory[SUM], state.memory[COUNT]))


def _prototypes_of(update: ClientUpdate) -> Prototypes:
    return Prototypes(update.payload[SUM], update.payload[COUNT])


def _stacked_prototypes(updates: Sequence[ClientUpdate]) -> Prototypes:
    return _in_float64(Prototypes.stack([_prototypes_of(update) for update in updates]))


def _in_float64(prototypes: Prototypes) -> Prototypes:
    """The server computes margins in double precision, wherever the prototypes come from."""
    return Prototypes(prototypes.sum.double().cpu(), prototypes.count.cpu())
