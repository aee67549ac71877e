"""Terms that strategies add to the loss of stacked jobs, in closed form or by `torch.func`.

Shapes: J jobs, C classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.func import grad, vmap

from fedproto.engines.stacking.flat import FlatLayout
from fedproto.engines.stacking.network import Calibration, Network
from fedproto.engines.training import TrainOptions
from fedproto.strategies.base import Objective, Strategy
from fedproto.types import Tensors


@dataclass(frozen=True)
class StackKind:
    """What the jobs of a stack have in common.

    Attributes:
        penalized_by: The strategy, where it has a penalty of its own making.
        term_of: The strategy, where it has a batch term.
        proximal: Whether any of them is drawn to the received weights.
        linear: Whether any of them has a term that is linear in the weights.
        calibrated: Whether any of them changes logits before the loss.
    """

    train: TrainOptions
    penalized_by: Strategy | None
    proximal: bool = False
    linear: bool = False
    calibrated: bool = False
    term_of: Strategy | None = None

    @property
    def rows(self) -> int:
        """Rows of a model's size per job, beside weights and the optimizer's own."""
        received = self.proximal or self.penalized_by is not None
        nearby = self.train.optimizer == "sam"
        return received + self.linear + (not self.in_place) + nearby + self.train.centralize

    @property
    def in_place(self) -> bool:
        """Whether gradients are subtracted as they are computed."""
        return self.train.plain and self.penalized_by is None and self.term_of is None

    @property
    def whole(self) -> bool:
        """Whether a step can be one kernel, where models have one: plain descent and a pull."""
        return self.in_place and not self.linear and not self.calibrated


class StackObjectives:
    """Room for the objectives of a stack's jobs, and their gradients.

    Attributes:
        received: The weights that jobs started from, where anything needs them.
        proximal: How strongly each job is drawn to them, ``[J]``.
    """

    def __init__(
        self, kind: StackKind, network: Network, layout: FlatLayout, weights: Tensor, classes: int
    ) -> None:
        self._kind, self._network, self._layout = kind, network, layout
        pulled = kind.proximal or kind.penalized_by is not None
        self.received = torch.zeros_like(weights) if pulled else None
        self._linear = torch.zeros_like(weights) if kind.linear else None
        self.proximal = weights.new_zeros(len(weights))
        self._calibration: Calibration | None = None
        if kind.calibrated:
            scale = weights.new_ones(len(weights), classes)
            self._calibration = Calibration(scale, torch.zeros_like(scale))

    def load(self, weights: Tensor, objectives: Sequence[Objective]) -> None:
        """Takes the objectives of the leading jobs, which start from these weights."""
        self.proximal.zero_()
        pulls = torch.tensor([one.proximal for one in objectives], dtype=self.proximal.dtype)
        self.proximal[: len(objectives)].copy_(pulls)
        if self.received is not None:
            self.received.copy_(weights)
        self._load_linear(objectives)
        if self._calibration is not None:
            self._calibration.scale.fill_(1)
            self._calibration.offset.zero_()
            for index, objective in enumerate(objectives):
                if objective.scale is not None:
                    self._calibration.scale[index].copy_(objective.scale)
                if objective.offset is not None:
                    self._calibration.offset[index].copy_(objective.offset)

    def calibration(self, size: int) -> Calibration | None:
        """Changes of the leading jobs' logits; None for none."""
        return None if self._calibration is None else self._calibration.leading(size)

    def descend(self, flat: Tensor, rate: Tensor) -> None:
        """Moves the leading jobs' weights against the gradient of the closed form."""
        size = len(flat)
        if self.received is not None:
            pull = (self.proximal[:size] * rate).unsqueeze(1)
            flat.lerp_(self.received[:size], pull)
        if self._linear is not None:
            flat.addcmul_(self._linear[:size], rate.unsqueeze(1), value=-1)

    def add_gradient(self, gradient: Tensor, flat: Tensor, params: Tensors) -> None:
        """Adds the gradient of penalty or closed form to that of the leading jobs' loss."""
        size, strategy, network = len(flat), self._kind.penalized_by, self._network
        if strategy is not None:
            assert self.received is not None  # noqa: S101 - there is one for every penalty
            received = self._layout.views(self.received[:size])
            extra = vmap(grad(strategy.penalty))(network.unpack(params), network.unpack(received))
            for name, tensor in network.pack(extra).items():
                self._layout.views(gradient)[name].add_(tensor)
        elif self.received is not None:
            pull = self.proximal[:size].unsqueeze(1)
            gradient.add_(pull * (flat - self.received[:size]))
        if self._linear is not None:
            gradient.add_(self._linear[:size])

    def _load_linear(self, objectives: Sequence[Objective]) -> None:
        if self._linear is None:
            return
        self._linear.zero_()
        views = self._layout.views(self._linear)
        for index, objective in enumerate(objectives):
            if objective.linear is not None:
                alone = {name: one.unsqueeze(0) for name, one in objective.linear.items()}
                for name, tensor in self._network.pack(alone).items():
                    views[name][index].copy_(tensor[0])
