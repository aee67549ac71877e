"""Named tensors in memory that a process shares with the processes it forks.

The memory is anonymous: it has no name to leak when a process is killed, and it does not count
against the small shared-memory mount of a container.
"""

from __future__ import annotations

import mmap

import torch
from torch import Tensor

from fedproto.types import Tensors

_ALIGNMENT = 64


class SharedSlots:
    """Several places for the tensors of a model."""

    def __init__(self, example: Tensors, slots: int) -> None:
        self.slots = slots
        self._example = {name: (tensor.shape, tensor.dtype) for name, tensor in example.items()}
        starts, size = {}, 0
        for name, tensor in example.items():
            starts[name] = size
            size += -(-tensor.numel() * tensor.element_size() // _ALIGNMENT) * _ALIGNMENT
        self._starts, self._slot_bytes = starts, size
        self._memory = mmap.mmap(-1, max(1, slots * size))

    def fits(self, tensors: Tensors) -> bool:
        """Whether a slot can hold such tensors."""
        return self._example == {name: (one.shape, one.dtype) for name, one in tensors.items()}

    def view(self, slot: int) -> dict[str, Tensor]:
        """A slot's tensors, in place."""
        views = {}
        for name, (shape, dtype) in self._example.items():
            count = shape.numel()
            start = slot * self._slot_bytes + self._starts[name]
            flat = (
                torch.frombuffer(self._memory, dtype=dtype, count=count, offset=start)
                if count
                else torch.empty(0, dtype=dtype)
            )
            views[name] = flat.view(shape)
        return views

    def write(self, slot: int, tensors: Tensors) -> None:
        """Puts tensors into a slot."""
        for name, view in self.view(slot).items():
            view.copy_(tensors[name])

    def read(self, slot: int) -> dict[str, Tensor]:
        """Copies of a slot's tensors."""
        return {name: view.clone() for name, view in self.view(slot).items()}
