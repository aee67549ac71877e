"""Gradients of stacked weights, either as tensors or as products that need not be carried out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor


@dataclass(frozen=True)
class Product:
    """A weight's gradient as ``left @ right``, ``[J, M, K]`` and ``[J, K, N]``.

    Plain gradient descent adds the product to the weight in place, which saves writing and reading
    a gradient as large as the weight itself.
    """

    left: Tensor
    right: Tensor

    def tensor(self) -> Tensor:
        """The gradient itself."""
        return torch.bmm(self.left, self.right)

    def subtract_from(self, weight: Tensor) -> None:
        """``weight −= left @ right``."""
        weight.baddbmm_(self.left, self.right, alpha=-1)


Gradient: TypeAlias = Tensor | Product


def as_tensor(gradient: Gradient) -> Tensor:
    """The gradient carried out."""
    return gradient.tensor() if isinstance(gradient, Product) else gradient


def subtract(gradient: Gradient, weight: Tensor) -> None:
    """``weight −= gradient``."""
    if isinstance(gradient, Product):
        gradient.subtract_from(weight)
    else:
        weight.sub_(gradient)
