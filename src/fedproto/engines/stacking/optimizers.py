"""The optimizers of local training, for stacked weights.

All jobs of a stack are at the same step, so one that counts steps counts them once for all. A
rate of 0 leaves a job's weights as they are: that is how finished jobs sit out the remaining steps.
Shapes: J jobs, P numbers in a model's row.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence

import torch
from torch import Tensor

from fedproto.engines.training import TINY, TrainOptions


class Optimizer(abc.ABC):
    """How weights follow gradients.

    Attributes:
        slots: Rows of the weights' size that it keeps.
    """

    slots: int

    @abc.abstractmethod
    def step(
        self,
        weight: Tensor,
        gradient: Tensor,
        slots: Sequence[Tensor],
        rate: Tensor,
        count: Tensor,
    ) -> None:
        """Moves the weights in place.

        Slots are zero before the first step; the rate of a finished job is 0.
        """


class Descent(Optimizer):
    """`torch.optim.SGD` with momentum and weight decay."""

    def __init__(self, momentum: float, weight_decay: float) -> None:
        self.slots = 1 if momentum else 0
        self._momentum = momentum
        self._weight_decay = weight_decay

    def step(
        self,
        weight: Tensor,
        gradient: Tensor,
        slots: Sequence[Tensor],
        rate: Tensor,
        count: Tensor,
    ) -> None:
        """``v = m·v + g``, ``w −= rate · v``."""
        del count
        gradient = gradient + self._weight_decay * weight
        if slots:
            gradient = slots[0].mul_(self._momentum).add_(gradient)
        weight.sub_(rate * gradient)


class Adam(Optimizer):
    """`torch.optim.Adam` with weight decay as part of the gradient."""

    slots = 2

    def __init__(self, weight_decay: float) -> None:
        self._weight_decay = weight_decay

    def step(
        self,
        weight: Tensor,
        gradient: Tensor,
        slots: Sequence[Tensor],
        rate: Tensor,
        count: Tensor,
    ) -> None:
        """Means of gradients and of their squares, both corrected for their start at zero."""
        mean, square = slots
        beta1, beta2, epsilon = 0.9, 0.999, 1e-8
        steps = (count + 1).double()
        start1 = (1 - torch.pow(beta1, steps)).to(weight.dtype)
        start2 = (1 - torch.pow(beta2, steps)).sqrt().to(weight.dtype)
        gradient = gradient + self._weight_decay * weight
        mean.lerp_(gradient, 1 - beta1)
        square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        weight.sub_(rate / start1 * mean / (square.sqrt() / start2 + epsilon))


def perturbed(weight: Tensor, gradient: Tensor, rho: float) -> Tensor:
    """SAM's weights ``w + ρ g / ‖g‖`` of every job; those of a job without a gradient are w."""
    return weight + gradient * (rho / (_norm(gradient) + TINY))


def clip(gradient: Tensor, most: float) -> None:
    """`torch.nn.utils.clip_grad_norm_` of every job's row."""
    gradient.mul_((most / (_norm(gradient) + 1e-6)).clamp(max=1))


def _norm(gradient: Tensor) -> Tensor:
    """L2 norms of rows ``[J, P]``; what lies between a row's tensors is zero."""
    norm: Tensor = torch.linalg.vector_norm(gradient, dim=1, keepdim=True)
    return norm


def optimizer_for(train: TrainOptions) -> Optimizer:
    """The stacked form of `TrainOptions.optimizer_for`."""
    if train.optimizer == "adam":
        return Adam(train.weight_decay)
    return Descent(train.momentum, train.weight_decay)
