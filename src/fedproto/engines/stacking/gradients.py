"""Gradients of stacked weights, either as tensors or as work that need not be carried out."""

from __future__ import annotations

import abc
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor


class Pending(abc.ABC):
    """A gradient that is not computed yet.

    Plain gradient descent lets it change the weight in place, which saves writing and reading a
    gradient as large as the weight itself.
    """

    @abc.abstractmethod
    def tensor(self) -> Tensor:
        """The gradient itself."""

    @abc.abstractmethod
    def subtract_from(self, weight: Tensor) -> None:
        """``weight −= gradient``."""


@dataclass(frozen=True)
class Product(Pending):
    """A weight's gradient as ``left @ right``, ``[J, M, K]`` and ``[J, K, N]``."""

    left: Tensor
    right: Tensor

    def tensor(self) -> Tensor:
        """The gradient itself."""
        return torch.bmm(self.left, self.right)

    def subtract_from(self, weight: Tensor) -> None:
        """``weight −= left @ right``."""
        weight.baddbmm_(self.left, self.right, alpha=-1)


Gradient: TypeAlias = Tensor | Pending


def as_tensor(gradient: Gradient) -> Tensor:
    """The gradient carried out."""
    return gradient.tensor() if isinstance(gradient, Pending) else gradient


def subtract(gradient: Gradient, weight: Tensor) -> None:
    """``weight −= gradient``."""
    if isinstance(gradient, Pending):
        gradient.subtract_from(weight)
    else:
        weight.sub_(gradient)
