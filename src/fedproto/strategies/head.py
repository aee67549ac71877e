"""The section ``[head]``: rows of the last layer, averaged among the holders of a class.

A client that lacks a class only pushes its row of the last layer down. With ``rows = "holders"``
the row of class c is averaged over the clients of the cohort that hold c; a row without a holder
stays as it was. Combines with every strategy that gives each client one weight.

Shapes: K clients of the cohort, C classes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from fedproto.errors import ConfigError, TrainingError
from fedproto.options import Options, option
from fedproto.strategies.contract import Declarations, Declared, Local, Needs, Setting
from fedproto.types import ClientWeights, Tensors, Updates

CLASSES = "classes/count"
"""Name in the payload."""

_GOLDEN = -0x61C8864680B583EB
_FRACTION = 2**53 - 1


@dataclass(frozen=True)
class HeadOptions(Options):
    """How the last layer is averaged, whatever the strategy."""

    rows: Literal["average", "holders", "counts"] = option(
        "average",
        "last layer: averaged like the rest, or row by row among the clients that hold the class,"
        " by the strategy's weights or by their samples of the class",
    )
    flip: float = option(
        0.0,
        "rows 'holders': probability that a client reports the opposite for a class (randomised"
        " response; drawn once per client and class, for the whole run)",
        at_least=0,
        at_most=0.5,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.flip and self.rows != "holders":
            raise ConfigError(
                "flip is for rows = 'holders'; with 'counts' clients report more than it hides"
            )

    @property
    def by_class(self) -> bool:
        """Whether rows are averaged class by class."""
        return self.rows != "average"

    @property
    def needs(self) -> Needs:
        """The client's class counts."""
        return Needs(classes=self.by_class)

    def check(self, setting: Setting) -> None:
        """Refuses a model without a last layer that has a row per class."""
        if self.by_class and not setting.head:
            raise TrainingError(
                f"head.rows = '{self.rows}' needs a model whose last layer is dense or a"
                " convolution with one row per class; set head.rows = 'average', or give the model"
                " a method last_layer()"
            )

    def payload(self, setting: Setting, num_examples: int) -> Declarations:
        """The classes that the client holds: counts, or 1 and 0."""
        if not self.by_class:
            return {}
        labels = num_examples * setting.labels
        high, total = (labels, labels) if self.rows == "counts" else (1, setting.num_classes)
        return {
            CLASSES: Declared((setting.num_classes,), torch.int64, low=0, high=high, total=total)
        }

    def report(self, local: Local) -> Tensors:
        """The client's classes, as the payload declares them."""
        if not self.by_class:
            return {}
        if self.rows == "counts":
            return {CLASSES: local.classes}
        holds_c = local.classes > 0
        if self.flip:
            holds_c = randomised_response(holds_c, local.secret, self.flip)
        return {CLASSES: holds_c.long()}

    def weigh(self, weights: ClientWeights, updates: Updates, setting: Setting) -> ClientWeights:
        """The strategy's weights, with shares of their own for the rows of the last layer."""
        if not self.by_class:
            return weights
        count_kc = torch.stack([update.payload[CLASSES] for update in updates]).cpu()
        by_weight_kc = weights.client.unsqueeze(1).expand(count_kc.shape)
        share_kc = class_shares(count_kc if self.rows == "counts" else by_weight_kc, count_kc > 0)
        own = dict.fromkeys((name for name in setting.head if name in updates[0].params), share_kc)
        return replace(weights, tensor={**(weights.tensor or {}), **own})


def class_shares(weight_kc: Tensor, holds_kc: Tensor) -> Tensor:
    """Shares class by class among the holders, ``A[k, c] = s_k[c] / Σ_j s_j[c]``, ``[K, C]``.

    Holders whose weights are all zero share equally; a class without a holder has no shares.
    """
    weight_kc = torch.where(holds_kc, weight_kc.double(), 0)
    total_c = weight_kc.sum(dim=0)
    equal_kc = holds_kc.double() / holds_kc.sum(dim=0).clamp(min=1)
    return torch.where(total_c > 0, weight_kc / torch.where(total_c > 0, total_c, 1), equal_kc)


def randomised_response(holds_c: Tensor, secret: int | Tensor, chance: float) -> Tensor:
    """The classes a client reports if it flips each answer with some probability.

    Each answer is then ``ln((1 − p) / p)``-differentially private (Warner 1965). The draws are a
    hash of secret and class (Steele et al. 2014, "SplitMix"), alike on every engine and in every
    round, so that answers of many rounds reveal no more than one.
    """
    bits = torch.as_tensor(secret, device=holds_c.device) + _GOLDEN * (
        1 + torch.arange(holds_c.shape[-1], device=holds_c.device)
    )
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15), (31, 1)):
        bits = (bits ^ ((bits >> shift) & ((1 << (64 - shift)) - 1))) * factor
    return holds_c ^ ((bits & _FRACTION).double() < chance * (_FRACTION + 1))
