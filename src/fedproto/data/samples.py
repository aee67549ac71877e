"""Samples: tensors in memory, or arrays on disk that are normalised batch by batch."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from fedproto.rng import Indices

RESIDENT_SHARE = 0.25
"""Mapped samples may take up this share of a device's memory where all are held at once."""


class Samples(Protocol):
    """Inputs and targets by index: the interface of a data set for engines."""

    def __len__(self) -> int: ...

    def batch(self, indices: Indices) -> tuple[Tensor, Tensor]:
        """Inputs ``[B, ...]`` and targets of some samples."""
        ...

    def to(self, device: torch.device, dtype: torch.dtype) -> Samples:
        """The same samples with batches on a device, inputs in a floating type."""
        ...


def _in_words(samples: TensorSamples | MappedSamples) -> str:
    inputs = samples.inputs
    kind = str(inputs.dtype).removeprefix("torch.")
    return f"{type(samples).__name__}({len(inputs):,} × {tuple(inputs.shape[1:])} {kind})"


@dataclass(frozen=True, repr=False)
class TensorSamples:
    """Samples held in memory, or on the device once moved there."""

    inputs: Tensor
    targets: Tensor

    def __len__(self) -> int:
        return len(self.inputs)

    __repr__ = _in_words

    def batch(self, indices: Indices) -> tuple[Tensor, Tensor]:
        """Gathers by index on the tensors' own device."""
        where = upload(torch.from_numpy(indices), self.inputs.device)
        return self.inputs.index_select(0, where), self.targets.index_select(0, where)

    def to(self, device: torch.device, dtype: torch.dtype) -> TensorSamples:
        """Moves all samples at once."""
        return TensorSamples(self.inputs.to(device, dtype), self.targets.to(device))


@dataclass(frozen=True, repr=False)
class MappedSamples:
    """Samples in memory-mapped arrays; a batch is read and normalised, bytes scaled to 0 to 1.

    On a GPU the samples are moved there as a whole when they take up little of its memory.

    Attributes:
        inputs: ``[N, ...]``; bytes for images, ``[N, channels, H, W]``.
        targets: ``[N]``, or a label map per sample.
        mean: Mean per channel or per pixel; empty for no normalisation.
        std: Standard deviation, likewise.
        relabel: The new label for each stored one ``[256]``; None keeps them.
    """

    inputs: Tensor
    targets: Tensor
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    relabel: Tensor | None = None
    device: torch.device | None = None
    dtype: torch.dtype = torch.float32

    def __len__(self) -> int:
        return len(self.inputs)

    __repr__ = _in_words

    def batch(self, indices: Indices) -> tuple[Tensor, Tensor]:
        """Reads by index and normalises on the device."""
        stored = self.inputs.index_select(0, torch.from_numpy(indices)).to(self.device)
        inputs = stored.to(self.dtype)
        if stored.dtype == torch.uint8:
            inputs = inputs / 255
        mean, std = self._scale
        if mean is not None:
            inputs = inputs - mean
        if std is not None:
            inputs = inputs / std
        targets = self.targets.index_select(0, torch.from_numpy(indices)).to(self.device).long()
        if self.relabel is not None:
            targets = self.relabel.to(targets.device)[targets]
        return inputs, targets

    def raw(self, indices: Indices) -> tuple[Tensor, Tensor]:
        """A batch without the normalisation, for display."""
        return replace(self, mean=(), std=()).batch(indices)

    def to(self, device: torch.device, dtype: torch.dtype) -> Samples:
        """Announces the device of batches; all samples are moved to a GPU if they fit well."""
        together = resident(self, device, dtype) if device.type == "cuda" else None
        return replace(self, device=device, dtype=dtype) if together is None else together

    def gathered(self, step: int = 4096) -> TensorSamples:
        """All samples on the device, normalised once."""
        first, first_targets = self.batch(np.zeros(1, dtype=np.int64))
        inputs = first.new_empty((len(self), *first.shape[1:]))
        targets = first_targets.new_empty((len(self), *first_targets.shape[1:]))
        for start in range(0, len(self), step):
            part = slice(start, min(start + step, len(self)))
            inputs[part], targets[part] = self.batch(np.arange(part.start, part.stop))
        return TensorSamples(inputs, targets)

    @cached_property
    def _scale(self) -> tuple[Tensor | None, Tensor | None]:
        """Mean and standard deviation in the shape of an input."""
        shape = self.inputs.shape[1:]

        def spread(values: tuple[float, ...]) -> Tensor | None:
            if not values:
                return None
            tensor = torch.tensor(values, device=self.device, dtype=self.dtype)
            by_pixel = len(values) == shape.numel() != shape[0]
            return tensor.view(shape if by_pixel else (-1, *[1] * (len(shape) - 1)))

        return spread(self.mean), spread(self.std)


def upload(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor on a device, without waiting for the work that a GPU still has to do."""
    if device.type != "cuda" or tensor.is_cuda:
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def resident(samples: Samples, device: torch.device, dtype: torch.dtype) -> TensorSamples | None:
    """All samples as tensors on a device; None if they are elsewhere or would not fit well."""
    if isinstance(samples, TensorSamples):
        return samples.to(device, dtype)
    if not isinstance(samples, MappedSamples):
        return None
    there = replace(samples, device=device, dtype=dtype)
    inputs, targets = there.batch(np.zeros(1, dtype=np.int64))
    needed = len(samples) * (inputs.nbytes + targets.nbytes)
    return there.gathered() if needed <= RESIDENT_SHARE * _memory(device) else None


def _memory(device: torch.device) -> int:
    """Free bytes of a GPU, or all bytes of the machine; 0 where they are unknown."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return 0
