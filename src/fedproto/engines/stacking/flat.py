"""All tensors of a model in one row, so that a stack of models is one matrix ``[J, P]``.

What treats all weights alike (loading, update rules, the proximal term) is then one operation,
however many tensors a model has. Small tensors lie together in front: their gradients are gathered
and applied in one go.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fedproto.types import Tensors

ALIGNMENT = 32
SMALL = 4096


class FlatLayout:
    """Where each of a model's tensors lies in its row.

    Attributes:
        starts: Where each tensor begins in a row.
        small: Names of the tensors in front, in their order, without gaps.
    """

    def __init__(self, example: Tensors) -> None:
        self._shapes = {name: tuple(tensor.shape) for name, tensor in example.items()}
        self.small = [name for name, tensor in example.items() if tensor.numel() <= SMALL]
        self.starts: dict[str, int] = {}
        self.size = 0
        for name in self.small:
            self.starts[name] = self.size
            self.size += math.prod(self._shapes[name])
        self.small_size = self.size
        # Large tensors and rows begin at aligned addresses, as the fast matrix kernels ask for.
        self.size = _aligned(self.size)
        for name in example:
            if name not in self.starts:
                self.starts[name] = self.size
                self.size = _aligned(self.size + math.prod(self._shapes[name]))

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """The tensors ``[J, …]`` inside of rows ``[J, P]``, by name."""
        return {
            name: flat[:, start : start + math.prod(self._shapes[name])].view(
                len(flat), *self._shapes[name]
            )
            for name, start in self.starts.items()
        }

    def gather_small(self, tensors: Tensors) -> Tensor:
        """The small tensors ``[J, …]`` side by side, as they lie in front of the rows."""
        return torch.cat([tensors[name].flatten(1) for name in self.small], dim=1)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
