"""The local update rules of `fedproto.training`, for stacked weights.

All jobs of a stack are at the same step, so a rule that counts steps counts them once for all. A
rate of 0 leaves a job's weights as they are: that is how finished jobs sit out the remaining steps.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fedproto.engines.stacking.blocks import Fuse
from fedproto.engines.stacking.gradients import Gradient, as_tensor, subtract
from fedproto.training import TrainOptions


class UpdateRule(abc.ABC):
    """How weights follow gradients.

    Attributes:
        slots: Tensors of the weights' size that the rule keeps.
        scaled: Whether it takes gradients that are multiplied by the rate already.
    """

    slots: int
    scaled: bool

    @abc.abstractmethod
    def apply(
        self,
        params: Mapping[str, Tensor],
        gradients: Mapping[str, Gradient],
        slots: Sequence[Mapping[str, Tensor]],
        rate: Tensor,
        count: Tensor,
        fuse: Fuse,
    ) -> None:
        """Moves the weights in place.

        Args:
            params: ``[J, …]`` by name.
            gradients: By name.
            slots: What the rule keeps, zero before the first step.
            rate: Learning rate per job, ``[J]``; 0 for a finished one.
            count: Steps made before this one.
            fuse: Makes the element-wise parts faster.
        """


class PlainDescent(UpdateRule):
    """``w −= rate · g``, carried out inside the matrix product that gives the gradient."""

    slots = 0
    scaled = True

    def apply(
        self,
        params: Mapping[str, Tensor],
        gradients: Mapping[str, Gradient],
        slots: Sequence[Mapping[str, Tensor]],
        rate: Tensor,
        count: Tensor,
        fuse: Fuse,
    ) -> None:
        """The gradients carry the rate already."""
        del slots, rate, count, fuse
        for name, gradient in gradients.items():
            subtract(gradient, params[name])


class Momentum(UpdateRule):
    """`torch.optim.SGD` with momentum and weight decay."""

    slots = 1
    scaled = False

    def __init__(self, momentum: float, weight_decay: float) -> None:
        self._momentum = momentum
        self._weight_decay = weight_decay

    def apply(
        self,
        params: Mapping[str, Tensor],
        gradients: Mapping[str, Gradient],
        slots: Sequence[Mapping[str, Tensor]],
        rate: Tensor,
        count: Tensor,
        fuse: Fuse,
    ) -> None:
        """``v = m·v + g``, ``w −= rate · v``."""
        del count
        for name, gradient in gradients.items():
            weight = params[name]
            fuse(_momentum_step)(
                weight,
                as_tensor(gradient),
                slots[0][name],
                per_job(rate, weight),
                self._momentum,
                self._weight_decay,
            )


class Adam(UpdateRule):
    """`torch.optim.Adam` with weight decay as part of the gradient."""

    slots = 2
    scaled = False

    def __init__(self, weight_decay: float) -> None:
        self._weight_decay = weight_decay

    def apply(
        self,
        params: Mapping[str, Tensor],
        gradients: Mapping[str, Gradient],
        slots: Sequence[Mapping[str, Tensor]],
        rate: Tensor,
        count: Tensor,
        fuse: Fuse,
    ) -> None:
        """Means of gradients and of their squares, both corrected for their start at zero."""
        for name, gradient in gradients.items():
            weight = params[name]
            fuse(_adam_step)(
                weight,
                as_tensor(gradient),
                slots[0][name],
                slots[1][name],
                per_job(rate, weight),
                count,
                self._weight_decay,
            )


def rule_for(train: TrainOptions) -> UpdateRule:
    """The stacked form of `TrainOptions.optimizer_for`."""
    if train.optimizer == "adam":
        return Adam(train.weight_decay)
    if train.momentum or train.weight_decay:
        return Momentum(train.momentum, train.weight_decay)
    return PlainDescent()


def per_job(value_j: Tensor, like: Tensor) -> Tensor:
    """One number per job, shaped to multiply a tensor ``[J, …]``."""
    return value_j.view(-1, *[1] * (like.dim() - 1))


def _momentum_step(
    weight: Tensor,
    gradient: Tensor,
    velocity: Tensor,
    rate: Tensor,
    momentum: float,
    weight_decay: float,
) -> None:
    velocity.mul_(momentum).add_(gradient + weight_decay * weight)
    weight.sub_(rate * velocity)


def _adam_step(
    weight: Tensor,
    gradient: Tensor,
    mean: Tensor,
    square: Tensor,
    rate: Tensor,
    count: Tensor,
    weight_decay: float,
) -> None:
    beta1, beta2, epsilon = 0.9, 0.999, 1e-8
    steps = (count + 1).double()
    start1 = (1 - torch.pow(beta1, steps)).to(weight.dtype)
    start2 = (1 - torch.pow(beta2, steps)).sqrt().to(weight.dtype)
    gradient = gradient + weight_decay * weight
    mean.lerp_(gradient, 1 - beta1)
    square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    weight.sub_(rate / start1 * mean / (square.sqrt() / start2 + epsilon))
