"""Guidance by classes: what clients tell of the classes that they hold, used in three ways.

The head's rows are averaged class by class, the attention balances the cohort's classes, and the
head rehearses the classes that a client lacks on the others' prototypes. The formulas are in
`fedproto.strategies.attention`; here is what clients send for them and what the server keeps, for
all strategies that have these options. docs/guidance.md tells what they gain and what they reveal.

Shapes: K clients of the cohort, C classes, D feature channels.
"""

# Long: one strategy whose hooks share their declarations.
from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedproto.errors import ConfigError, TrainingError
from fedproto.options import option
from fedproto.strategies.aggregation import MEAN, AggregateOptions
from fedproto.strategies.attention import balanced_attention, class_attention, randomised_response
from fedproto.strategies.contract import (
    Declarations,
    Declared,
    Local,
    Look,
    Looks,
    Objective,
    Report,
    Seen,
    Setting,
    Virtual,
)
from fedproto.strategies.prototypes import feature_sizes, merged_prototypes, prototypes_declared
from fedproto.strategies.served import Served
from fedproto.types import ClientWeights, Prototypes, ServerState, Tensors, Updates

CLASSES = "classes/count"
REHEARSED, REHEARSED_COUNT = "rehearsal/mean", "rehearsal/count"
SEEN_SUM, SEEN_COUNT = "rehearsal/sum", "rehearsal/seen"
"""Names in payload and memory."""

FEATURES: frozenset[Look] = frozenset({"features"})


@dataclass(frozen=True)
class Guidance(Served):
    """Options that use which classes clients hold; all of them off unless asked for.

    Attributes:
        has_margins: Whether there are margins per class to weigh the head's rows by.
    """

    has_margins: ClassVar[bool] = False

    head: Literal["average", "by-class"] = option(
        "average",
        "last layer: averaged like the rest, or its row of a class over the clients that hold it",
    )
    head_weights: Literal["holders", "counts", "margins"] = option(
        "holders",
        "head by class: holders count by their weights, by their samples of the class, or by their"
        " margins of it (fedproto)",
    )
    head_others: float = option(
        0.0,
        "head by class: part ρ of its weight that a client without the class has in its row",
        at_least=0,
        at_most=1,
    )
    flip: float = option(
        0.0,
        "head by class: chance that a client says the opposite of each class, held or not",
        at_least=0,
        at_most=0.5,
    )
    balance: float = option(
        0.1, "weights 'balanced': pull λ towards equal weights; large is equal", above=0
    )
    rehearsal: float = option(
        0.0, "weight λ of the prototypes of classes that a client lacks in its loss", at_least=0
    )
    rehearsed: Literal["trained", "received", "running"] = option(
        "received",
        "rehearsal: prototypes under the clients' trained models, under the model they received, or"
        " the running mean of the trained ones",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.by_class and self.head_weights == "margins" and not self.has_margins:
            raise ConfigError("head_weights 'margins' needs prototypes; use strategy 'fedproto'")
        if self.head_others and self.head_weights != "holders":
            raise ConfigError("head_others is for head_weights = 'holders'")
        tells_more = self._tells_counts or self.rehearsal > 0 or self.has_margins
        if self.flip and (tells_more or not self.by_class):
            raise ConfigError(
                "flip is for head = 'by-class' with head_weights = 'holders', without rehearsal:"
                " elsewhere clients tell their counts, and it would hide nothing"
            )

    @property
    def by_class(self) -> bool:
        """Whether the head's rows are averaged class by class."""
        return self.head == "by-class"

    @property
    def balances(self) -> bool:
        """Whether clients are weighed so that classes are balanced."""
        return False

    @property
    def weighs_tensors(self) -> bool:
        """The head is weighed by itself."""
        return self.by_class

    @property
    def looks(self) -> Looks:
        """The classes for every rule; features for prototypes."""
        found = super().looks | Looks(classes=self.by_class or self.balances or self.rehearsal > 0)
        if not self.rehearsal:
            return found
        received = self.rehearsed == "received"
        return found | (Looks(before=FEATURES) if received else Looks(after=FEATURES))

    @property
    def _tells_counts(self) -> bool:
        """Whether it matters how much a client has of a class, or only whether it has any."""
        return self.balances or (self.by_class and self.head_weights == "counts")

    def payload(self, setting: Setting, num_examples: int) -> Declarations:
        """The classes that the client holds, and prototypes for others to rehearse."""
        declared = dict(super().payload(setting, num_examples))
        if self.by_class or self.balances:
            labels = num_examples * setting.labels
            high, total = (labels, labels) if self._tells_counts else (1, setting.num_classes)
            shape = (setting.num_classes,)
            declared[CLASSES] = Declared(shape, torch.int64, low=0, high=high, total=total)
        if self._rehearses(setting) and not self._sends_prototypes:
            declared |= prototypes_declared(setting, num_examples, SEEN_SUM, SEEN_COUNT)
        return declared

    def _rehearses(self, setting: Setting) -> bool:
        """Whether heads rehearse; some models have none that could."""
        if self.rehearsal and not setting.scores_features:
            raise TrainingError(
                "rehearsal needs a model whose scores are a function of its features alone, with"
                " features(x) and head(features); this one has no such head, so set rehearsal = 0"
            )
        return self.rehearsal > 0

    @property
    def _sends_prototypes(self) -> bool:
        """Whether the strategy itself has clients send what is rehearsed."""
        return False

    def server_memory(self, setting: Setting) -> Declarations:
        """The prototypes to rehearse, which clients get."""
        kept = super().server_memory(setting)
        if not self._rehearses(setting):
            return kept
        classes, channels, _ = feature_sizes(setting, 0)
        return {
            **kept,
            REHEARSED: Declared((classes, channels), setting.float_type, broadcast=True),
            REHEARSED_COUNT: Declared((classes,), torch.int64, broadcast=True),
        }

    def objective(self, local: Local) -> Objective:
        """The known prototypes of the classes that the client lacks, for its head."""
        if not self.rehearsal:
            return Objective()
        lacks_c = (local.classes == 0) & (local.broadcast[REHEARSED_COUNT] > 0)
        labels = lacks_c.nonzero().flatten()
        if not len(labels):
            return Objective()
        return Objective(
            virtual=Virtual(local.broadcast[REHEARSED][labels], labels, self.rehearsal)
        )

    def report(self, local: Local, trained: Tensors, before: Seen, after: Seen) -> Report:
        """How much the client has of each class, or only whether, and its prototypes."""
        told = super().report(local, trained, before, after)
        payload = dict(told.payload)
        if self.by_class or self.balances:
            holds_c = local.classes > 0
            if self.flip:
                holds_c = randomised_response(holds_c, local.secret, self.flip)
            payload[CLASSES] = local.classes if self._tells_counts else holds_c.long()
        if self.rehearsal and not self._sends_prototypes:
            seen = before if self.rehearsed == "received" else after
            assert seen is not None  # noqa: S101 - asked for in `looks`
            payload |= {SEEN_SUM: seen.sums, SEEN_COUNT: seen.count}
        return replace(told, payload=payload)

    def balanced(self, updates: Updates) -> Tensor:
        """The weights under which the cohort's classes are balanced, ``[K]``."""
        return balanced_attention(_classes_of(updates), self.balance)

    def class_scores(self, state: ServerState, updates: Updates, weights: ClientWeights) -> Tensor:
        """What clients count for the head's row of a class that they hold, ``[K, C]``."""
        del state
        count_kc = _classes_of(updates)
        if self.head_weights == "counts":
            return count_kc
        return weights.client.unsqueeze(1).expand(count_kc.shape)

    def aggregate(
        self,
        state: ServerState,
        updates: Updates,
        weights: ClientWeights,
        setting: Setting,
        options: AggregateOptions = MEAN,
    ) -> tuple[ServerState, Tensor]:
        """As the strategy's weights say, but for the head's rows where they go by class."""
        if self.by_class:
            if not setting.head:
                raise TrainingError(
                    "head = 'by-class' needs a model whose last layer is dense or a convolution"
                    " with one row per class; this one's is not, so set head = 'average', or give"
                    " the model a method last_layer()"
                )
            score_kc = self.class_scores(state, updates, weights)
            share_kc = class_attention(score_kc, _classes_of(updates) > 0, self.head_others)
            weights = replace(weights, tensor=dict.fromkeys(setting.head, share_kc))
        return super().aggregate(state, updates, weights, setting, options)

    def rehearsable(self, updates: Updates) -> Prototypes:
        """The cohort's prototypes to rehearse, merged, as clients sent them."""
        return merged_prototypes(updates, SEEN_SUM, SEEN_COUNT)

    def remember(self, state: ServerState, updates: Updates, setting: Setting) -> Tensors:
        """The prototypes to rehearse next; those of a class that nobody held stay."""
        kept = super().remember(state, updates, setting)
        if not self._rehearses(setting):
            return kept
        new, old_cd = self.rehearsable(updates), state.memory[REHEARSED]
        known_c = (state.memory[REHEARSED_COUNT] > 0).to(new.count.device)
        mean_cd = new.mean.to(setting.float_type)
        old_cd = old_cd.to(mean_cd.device)
        if self.rehearsed == "running":
            mean_cd = torch.where(known_c.unsqueeze(1), (mean_cd + old_cd) / 2, mean_cd)
        return {
            **kept,
            REHEARSED: torch.where(new.seen.unsqueeze(1), mean_cd, old_cd),
            REHEARSED_COUNT: torch.where(
                new.seen, new.count, state.memory[REHEARSED_COUNT].to(new.count.device)
            ),
        }


def _classes_of(updates: Updates) -> Tensor:
    """What clients tell of their classes, ``[K, C]``, where the server computes."""
    return torch.stack([update.payload[CLASSES] for update in updates]).cpu()
