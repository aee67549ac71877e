"""The values that a strategy's hooks take and return.

Engines, guard, wire format and store handle *named maps of declared tensors*. Names are made of a
group and a name, ``control/conv1.weight``; see `under` and `part` of `fedproto.types`.

Shapes: B samples of a batch, C classes, D feature channels.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from fedproto.equations import class_sums
from fedproto.errors import TrainingError
from fedproto.types import Prototypes, Tensors

Statistic: TypeAlias = Literal["features", "products", "class_products"]
"""Statistics of a client's training data under a model: see `Observation`."""

Average: TypeAlias = Literal["none", "ema", "window", "all"]
"""Averages of the served model over rounds: see `fedproto.strategies.serve`."""

LARGEST = 1e30
"""Largest plausible number: sums of larger ones could overflow."""


@dataclass(frozen=True)
class Declared:
    """A tensor that a strategy keeps or sends.

    Attributes:
        shape: Its sides.
        dtype: Its type.
        low: Smallest plausible value.
        high: Largest plausible value.
        total: Largest plausible sum of all values.
        zero_where: Name of another tensor of the same map; where that is zero, so is this one.
        counted_by: Sums of vectors, a row per class: name of the number of vectors in each.
        squares_of: Upper half of the summed products of vectors: name of their sums.
        initial: Value before the first round, in memory; None for no tensor until there is one.
        broadcast: Server memory alone: whether clients get it beside the weights.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    low: float = -LARGEST
    high: float = LARGEST
    total: float = math.inf
    zero_where: str | None = None
    counted_by: str | None = None
    squares_of: str | None = None
    initial: float | None = 0.0
    broadcast: bool = False


Declarations: TypeAlias = Mapping[str, Declared]


@dataclass(frozen=True)
class Setting:
    """The model and the federation, on which declarations may depend.

    Attributes:
        params: The model's trainable tensors, for names, shapes and types.
        features: Channels of a feature vector, and vectors per sample; None if unknown.
        head: Names of the last layer's parameters, with a row per class; empty where unknown.
        labels: Labels that one sample has.
        has_head: Whether the model has a head, so that logits are a function of the features alone.
        buffers: The model's other tensors.
        linear: Whether the logits are the head's rows times the features, plus its bias.
    """

    params: Tensors
    num_classes: int
    num_clients: int
    features: tuple[int, int] | None = None
    head: tuple[str, ...] = ()
    labels: int = 1
    has_head: bool = True
    buffers: Tensors = field(default_factory=dict)
    linear: bool = True

    @property
    def float_type(self) -> torch.dtype:
        """The model's floating type."""
        floating = (one.dtype for one in self.params.values() if one.is_floating_point())
        return next(floating, torch.float32)

    def feature_sizes(self) -> tuple[int, int]:
        """Channels of a feature vector, and feature vectors per sample.

        Raises:
            TrainingError: If the model's features are unknown.
        """
        if self.features is None:
            raise TrainingError(
                "prototypes need the shape of the model's features, which is unknown: its"
                " features(x) must take a batch of one input"
            )
        return self.features

    def like(
        self,
        group: str,
        tensors: Tensors,
        *,
        broadcast: bool = False,
        initial: float | None = 0.0,
    ) -> dict[str, Declared]:
        """One tensor like each of some others, in a group."""
        return {
            f"{group}/{name}": Declared(
                tuple(one.shape), one.dtype, broadcast=broadcast, initial=initial
            )
            for name, one in tensors.items()
        }

    def like_params(
        self, group: str, *, broadcast: bool = False, initial: float | None = 0.0
    ) -> dict[str, Declared]:
        """One tensor like each of the model's parameters, in a group."""
        return self.like(group, self.params, broadcast=broadcast, initial=initial)

    def like_model(self, group: str, *, broadcast: bool = False) -> dict[str, Declared]:
        """A whole model in a group, parameters and buffers; none before the first round."""
        return self.like(group, {**self.params, **self.buffers}, broadcast=broadcast, initial=None)


def initial_tensors(declared: Declarations) -> dict[str, Tensor]:
    """Memory before the first round."""
    return {
        name: torch.full(one.shape, one.initial, dtype=one.dtype)
        for name, one in declared.items()
        if one.initial is not None
    }


@dataclass(frozen=True)
class Needs:
    """The needs of a strategy or a section, for the engine that runs its jobs.

    Attributes:
        classes: Whether the client's class counts are needed.
        before: Statistics of the client's data under the received model; a pass over the data.
        after: The same under the trained model.
        hooks: Those of `HOOKS` that the strategy defines.
        frozen: Frozen models whose outputs the batch term sees: "received", or a group of client
            memory or broadcast that holds a whole model.
        personal_model: Whether each client also trains a model of its own.
    """

    classes: bool = False
    before: frozenset[Statistic] = frozenset()
    after: frozenset[Statistic] = frozenset()
    hooks: frozenset[str] = frozenset()
    frozen: tuple[str, ...] = ()
    personal_model: bool = False

    def __or__(self, other: Needs) -> Needs:
        return Needs(
            self.classes or other.classes,
            self.before | other.before,
            self.after | other.after,
            self.hooks | other.hooks,
            tuple(dict.fromkeys((*self.frozen, *other.frozen))),
            self.personal_model or other.personal_model,
        )


@dataclass(frozen=True, repr=False)
class Observation(Prototypes):
    """Statistics of some samples under a model: summed features, their number, and products.

    What was not asked for has no channels.

    Attributes:
        products: Summed products of features, ``[..., D, D]``; by class, ``[..., C, D, D]``, where
            the statistic "class_products" was asked for. In double precision: the difference to the
            products of the means can be small.
    """

    products: Tensor = field(default_factory=lambda: torch.empty(0, 0))

    @staticmethod
    def of(
        what: frozenset[Statistic], features: Tensor | None, labels: Tensor, num_classes: int
    ) -> Observation:
        """The statistics of feature vectors with their labels; void is left out."""
        sums, count = class_sums(features, labels, num_classes)
        counts = labels >= 0
        if "class_products" in what:
            by_class = torch.arange(num_classes, device=labels.device).unsqueeze(-1)
            counts = labels.unsqueeze(-2) == by_class
            features = None if features is None else features.unsqueeze(-3)
        elif "products" not in what:
            features = None
        if features is None:
            return Observation(sums, count, sums.new_empty((*labels.shape[:-1], 0, 0)))
        known_nd = (features * counts.unsqueeze(-1)).double()
        return Observation(sums, count, known_nd.transpose(-1, -2) @ known_nd)


Seen: TypeAlias = "Observation | None"
"""Statistics where they were asked for."""


@dataclass(frozen=True)
class Outputs:
    """Features ``[B, D]`` and logits ``[B, C]`` of a batch under a model."""

    features: Tensor
    logits: Tensor


@dataclass(frozen=True)
class Batch:
    """A training batch as a strategy's `batch_term` sees it.

    Attributes:
        features: Under the model in training, ``[B, D]``.
        logits: Likewise, ``[B, C]``, before any calibration.
        targets: Labels, ``[B]``.
        weight: Share of each sample in the batch's mean, ``[B]``; 0 for samples that only fill up a
            batch in an engine that trains many clients at once.
        frozen: Outputs under the frozen models that the strategy names, without gradients, in
            evaluation mode.
    """

    features: Tensor
    logits: Tensor
    targets: Tensor
    weight: Tensor
    frozen: Mapping[str, Outputs] = field(default_factory=dict)

    def mean(self, values_b: Tensor) -> Tensor:
        """The mean over the batch's samples, ``[B]`` to a number."""
        # Not a product alone: a sample that only fills up may give an infinite value.
        return torch.where(self.weight > 0, values_b * self.weight, 0).sum()


@dataclass(frozen=True)
class Objective:
    """Terms of the local loss in closed forms, which every engine computes.

    The loss of logits ``z`` becomes that of ``scale · z + offset``, and ``μ/2 ‖w − w_t‖² + ⟨h, w⟩``
    is added to it.

    Attributes:
        proximal: μ.
        linear: h by parameter name; None for none.
        scale: Per class, ``[C]``; None for 1.
        offset: Per class, ``[C]``; None for 0.
    """

    proximal: float = 0.0
    linear: Tensors | None = None
    scale: Tensor | None = None
    offset: Tensor | None = None

    @property
    def calibrated(self) -> bool:
        """Whether logits are changed before the loss sees them."""
        return self.scale is not None or self.offset is not None

    def calibrate(self, logits: Tensor) -> Tensor:
        """Logits ``[B, C, …]`` as the loss sees them."""
        along = (1, -1, *[1] * (logits.dim() - 2))
        if self.scale is not None:
            logits = logits * self.scale.to(logits).view(along)
        return logits if self.offset is None else logits + self.offset.to(logits).view(along)

    def closed_form(self, params: Tensors, received: Tensors) -> Tensor | None:
        """``μ/2 ‖w − w_t‖² + ⟨h, w⟩``; None where both are absent, so that nothing is added."""
        terms = []
        if self.proximal:
            squares = [(params[name] - received[name]).square().sum() for name in params]
            terms.append(self.proximal / 2 * torch.stack(squares).sum())
        if self.linear is not None:
            products = [(self.linear[name] * params[name]).sum() for name in params]
            terms.append(torch.stack(products).sum())
        return sum(terms[1:], terms[0]) if terms else None


@dataclass(frozen=True)
class Local:
    """A client's side of a job, as strategies see it.

    Numbers are zero-dimensional tensors in `Strategy.batch_term` where an engine asks for many
    clients at once by `torch.vmap`.

    Attributes:
        steps: Local steps to make.
        class_counts: Labels per class ``[C]`` if `Needs.classes` asks for them, otherwise None.
        params: The received parameters.
        broadcast: Tensors that the server sent beside the weights.
        memory: Tensors that the client kept.
        head: Names of the last layer's parameters; empty where unknown.
    """

    num_examples: int | Tensor
    steps: int | Tensor
    lr: float | Tensor
    class_counts: Tensor | None
    params: Tensors
    broadcast: Tensors
    memory: Tensors
    head: tuple[str, ...] = ()

    @property
    def classes(self) -> Tensor:
        """Labels per class ``[C]``, for a strategy that declares that it needs them."""
        if self.class_counts is None:
            raise TrainingError("local.classes needs a strategy's statistics = Needs(classes=True)")
        return self.class_counts


@dataclass(frozen=True)
class Report:
    """Tensors that a client sends (payload) and keeps (memory) after training."""

    payload: Tensors = field(default_factory=dict)
    memory: Tensors = field(default_factory=dict)
