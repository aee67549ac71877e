"""What a strategy declares and what it is told: the values between strategies and everything else.

Engines, guard, wire format and store handle *named maps of declared tensors* and know no
strategy's words. Names are made of a group and a name, ``control/conv1.weight``; `under` and `part`
of `fedproto.types` put groups together and take them apart.

Shapes: C classes, D feature channels, V virtual feature vectors.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from fedproto.equations import class_sums
from fedproto.types import Tensors

Look: TypeAlias = Literal["features", "squares", "loss"]
"""What a client can look up of its training data under a model."""

LARGEST = 1e30
"""Beyond this a finite number is taken for a broken one: sums of a few would be infinite."""


@dataclass(frozen=True)
class Declared:
    """A tensor that a strategy keeps or sends.

    Attributes:
        shape: Its sides.
        dtype: Its type.
        low: Smallest value that is believed.
        high: Largest value that is believed.
        total: Largest sum of all values that is believed.
        zero_where: Name of another tensor of the same map; where that is zero, so is this one.
        initial: Value before the first round, in memory; None for no tensor until there is one.
        broadcast: Server memory alone: whether clients get it beside the weights.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    low: float = -LARGEST
    high: float = LARGEST
    total: float = math.inf
    zero_where: str | None = None
    initial: float | None = 0.0
    broadcast: bool = False


Declarations: TypeAlias = Mapping[str, Declared]


@dataclass(frozen=True)
class FeatureShape:
    """What the features of a model on a federation look like."""

    channels: int
    per_sample: int


@dataclass(frozen=True)
class Setting:
    """What declarations may depend on: the model and the federation.

    Attributes:
        params: The model's trainable tensors, for names, shapes and types.
        features: What features look like; None where the model could not tell.
        head: Names of the parameters with a row per class that give the scores; empty where the
            model could not tell.
        labels: Labels that one sample has.
        scores_features: Whether scores are a function of the features alone.
        buffers: The model's other tensors.
        linear: Whether the logits are the head's rows times the features, plus its bias.
    """

    params: Tensors
    num_classes: int
    num_clients: int
    features: FeatureShape | None = None
    head: tuple[str, ...] = ()
    labels: int = 1
    scores_features: bool = True
    buffers: Tensors = field(default_factory=dict)
    linear: bool = True

    @property
    def float_type(self) -> torch.dtype:
        """The model's floating type."""
        floating = (one.dtype for one in self.params.values() if one.is_floating_point())
        return next(floating, torch.float32)

    def like_params(
        self,
        group: str,
        *,
        broadcast: bool = False,
        initial: float | None = 0.0,
        buffers: bool = False,
    ) -> dict[str, Declared]:
        """One tensor like each of the model's parameters, or all its tensors, in a group."""
        like = {**self.params, **self.buffers} if buffers else self.params
        return {
            f"{group}/{name}": Declared(
                tuple(one.shape), one.dtype, broadcast=broadcast, initial=initial
            )
            for name, one in like.items()
        }


def initial_tensors(declared: Declarations) -> dict[str, Tensor]:
    """Memory before the first round."""
    return {
        name: torch.full(one.shape, one.initial, dtype=one.dtype)
        for name, one in declared.items()
        if one.initial is not None
    }


@dataclass(frozen=True)
class Looks:
    """What a client looks up in its own training data for a strategy; each costs a pass over it."""

    classes: bool = False
    before: frozenset[Look] = frozenset()
    after: frozenset[Look] = frozenset()

    def __or__(self, other: Looks) -> Looks:
        return Looks(
            self.classes or other.classes, self.before | other.before, self.after | other.after
        )


@dataclass(frozen=True)
class Observation:
    """What a model makes of some samples, as sums, so that adding two is exact.

    Leading dimensions are allowed in front, one place per client.

    Attributes:
        sums: Summed features per class, ``[..., C, D]``; no channels where nobody asked for them.
        count: Feature vectors per class, ``[..., C]``.
        loss: Mean loss, ``[...]``; 0 where nobody asked for it.
        squares: Summed products of features ``[..., D, D]``; no channels where nobody asked.
    """

    sums: Tensor
    count: Tensor
    loss: Tensor
    squares: Tensor = field(default_factory=lambda: torch.empty(0, 0))

    @staticmethod
    def of(
        what: frozenset[Look],
        features: Tensor | None,
        labels: Tensor,
        num_classes: int,
        loss: Tensor,
    ) -> Observation:
        """What features with their labels sum up to."""
        squares = _summed_squares(features if "squares" in what else None, labels)
        return Observation(*class_sums(features, labels, num_classes), loss, squares)

    def __iter__(self) -> Iterator[Tensor]:
        return iter((self.sums, self.count, self.loss, self.squares))

    def __add__(self, other: Observation) -> Observation:
        return Observation(*(one + another for one, another in zip(self, other, strict=True)))


def _summed_squares(e_nd: Tensor | None, y_n: Tensor) -> Tensor:
    """``Σ e eᵀ`` over feature vectors of all classes, ``[D, D]``; void counts nowhere.

    No features: no channels.
    """
    if e_nd is None:
        return torch.empty((*y_n.shape[:-1], 0, 0), device=y_n.device)
    # In double precision: what is left of them when the means are taken off can be small.
    known_nd = (e_nd * (y_n >= 0).unsqueeze(-1)).double()
    return known_nd.transpose(-1, -2) @ known_nd


Seen: TypeAlias = "Observation | None"
"""What was looked up; None where nobody asked."""


@dataclass(frozen=True)
class Virtual:
    """Labelled feature vectors that the head sees beside those of a batch.

    Adds ``weight`` times the mean loss over the vectors to the local objective.
    """

    features: Tensor
    labels: Tensor
    weight: float


@dataclass(frozen=True)
class Objective:
    """What a strategy adds to the local loss, in the forms that every engine runs by itself.

    The loss of scores ``z`` becomes that of ``scale · z + offset``, and ``μ/2 ‖w − w_t‖² + ⟨h, w⟩``
    is added to it.

    Attributes:
        proximal: μ.
        linear: h by parameter name; None for none.
        scale: Per class, ``[C]``; None for 1.
        offset: Per class, ``[C]``; None for 0.
        virtual: Feature vectors for the head; None for none.
    """

    proximal: float = 0.0
    linear: Tensors | None = None
    scale: Tensor | None = None
    offset: Tensor | None = None
    virtual: Virtual | None = None

    @property
    def calibrated(self) -> bool:
        """Whether scores are changed before the loss sees them."""
        return self.scale is not None or self.offset is not None

    def calibrate(self, scores: Tensor) -> Tensor:
        """Scores ``[B, C, …]`` as the loss sees them."""
        along = (1, -1, *[1] * (scores.dim() - 2))
        if self.scale is not None:
            scores = scores * self.scale.to(scores).view(along)
        return scores if self.offset is None else scores + self.offset.to(scores).view(along)

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

    Numbers are tensors without sides in `Strategy.report`, where an engine may ask for many clients
    at once by `torch.vmap`.

    Attributes:
        steps: Local steps to make.
        classes: Labels per class ``[C]`` if `Looks.classes` asks for them, otherwise empty.
        broadcast: What the server sent beside the weights.
        memory: What the client kept.
        secret: For what a client adds at random; over a network nobody else knows it.
    """

    num_examples: int | Tensor
    steps: int | Tensor
    lr: float | Tensor
    classes: Tensor
    params: Tensors
    broadcast: Tensors
    memory: Tensors
    secret: int | Tensor = 0


@dataclass(frozen=True)
class Report:
    """What a client says and keeps after training."""

    payload: Tensors = field(default_factory=dict)
    memory: Tensors = field(default_factory=dict)
