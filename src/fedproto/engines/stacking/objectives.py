"""What strategies add to the loss of stacked jobs: pull, linear term, what lies beside a batch.

Shapes: J jobs, V virtual feature vectors, D feature channels, C classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.func import grad, vmap

from fedproto.engines.stacking.flat import FlatLayout
from fedproto.engines.stacking.network import Beside, Network
from fedproto.engines.training import TrainOptions
from fedproto.strategies.base import Strategy
from fedproto.strategies.contract import Objective
from fedproto.types import Tensors


@dataclass(frozen=True)
class StackKind:
    """What the jobs of a stack have in common.

    Attributes:
        penalized_by: The strategy, where it has a penalty of its own making.
        proximal: Whether any of them is drawn to the received weights.
        linear: Whether any of them has a term that is linear in the weights.
        beside: Whether the loss of any sees more than the scores of a batch.
        virtual: Virtual feature vectors of a job at most, and their channels.
    """

    train: TrainOptions
    penalized_by: Strategy | None
    proximal: bool = False
    linear: bool = False
    beside: bool = False
    virtual: tuple[int, int] = (0, 0)

    @property
    def rows(self) -> int:
        """Rows of a model's size per job, beside weights and the optimizer's own."""
        received = self.proximal or self.penalized_by is not None
        nearby = self.train.optimizer == "sam"
        return received + self.linear + (not self.in_place) + nearby + self.train.centralize

    @property
    def in_place(self) -> bool:
        """Whether gradients are subtracted as they are computed."""
        return self.train.plain and self.penalized_by is None

    @property
    def whole(self) -> bool:
        """Whether a step can be one kernel, where models have one: plain descent and a pull."""
        return self.in_place and not self.linear and not self.beside


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
        self._beside = self._room_beside(weights, classes) if kind.beside else None

    def load(self, weights: Tensor, objectives: Sequence[Objective]) -> None:
        """Takes the objectives of the leading jobs, which start from these weights."""
        self.proximal.zero_()
        pulls = torch.tensor([one.proximal for one in objectives], dtype=self.proximal.dtype)
        self.proximal[: len(objectives)].copy_(pulls)
        if self.received is not None:
            self.received.copy_(weights)
        self._load_linear(objectives)
        self._load_beside(objectives)

    def beside(self, size: int, rate: Tensor) -> Beside | None:
        """What the loss of the leading jobs sees beside a batch.

        Weights carry the rates where gradients are subtracted as they are computed.
        """
        if self._beside is None:
            return None
        leading = self._beside.leading(size)
        if not self._kind.in_place:
            return leading
        return replace(leading, weight=leading.weight * rate.unsqueeze(1))

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

    def _room_beside(self, weights: Tensor, classes: int) -> Beside:
        """Buffers for what the loss sees beside a batch; nothing to begin with."""
        virtual, channels = self._kind.virtual

        def numbers(*sides: int) -> Tensor:
            return weights.new_zeros(len(weights), *sides)

        return Beside(
            scale=numbers(classes),
            offset=numbers(classes),
            features=numbers(virtual, channels),
            labels=numbers(virtual).long(),
            weight=numbers(virtual),
        )

    def _load_beside(self, objectives: Sequence[Objective]) -> None:
        room = self._beside
        if room is None:
            return
        room.scale.fill_(1)
        for rest in (room.offset, room.features, room.labels, room.weight):
            rest.zero_()
        for index, objective in enumerate(objectives):
            if objective.scale is not None:
                room.scale[index].copy_(objective.scale)
            if objective.offset is not None:
                room.offset[index].copy_(objective.offset)
            virtual = objective.virtual
            if virtual is not None and len(virtual.labels):
                number = len(virtual.labels)
                room.features[index, :number].copy_(self._network.pack_features(virtual.features))
                room.labels[index, :number].copy_(virtual.labels)
                room.weight[index, :number] = virtual.weight / number
