"""Samples: tensors in memory, or arrays on disk that are normalised batch by batch.

Also their normalisation, and the feature shift between clients.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, Protocol, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - the name everyone uses

from fedproto.errors import DataError
from fedproto.rng import Indices, Purpose, stream

WHITE = 255

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

    def __post_init__(self) -> None:
        shape = self.inputs.shape[1:]
        for name, values in (("mean", self.mean), ("std", self.std)):
            if len(values) not in (0, 1, *shape[:1], shape.numel()):
                raise DataError(
                    f"{name} has {len(values)} values for inputs of shape {tuple(shape)}; give one"
                    " per channel"
                )
        if any(value <= 0 for value in self.std):
            raise DataError(f"std must be above 0, not {min(self.std):g}")

    def __len__(self) -> int:
        return len(self.inputs)

    __repr__ = _in_words

    def batch(self, indices: Indices) -> tuple[Tensor, Tensor]:
        """Reads by index and normalises on the device."""
        stored = self.inputs.index_select(0, torch.from_numpy(indices)).to(self.device)
        inputs = stored.to(self.dtype)
        if stored.dtype == torch.uint8:
            inputs = inputs / WHITE
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


Normalize: TypeAlias = Literal["given", "none", "channel", "pixel"]

EPSILON = 1e-3
"""Added to every standard deviation, in the scale of the stored numbers (0 to 255 for bytes)."""

_AT_ONCE = 1 << 24


def normalized(
    samples: TensorSamples | MappedSamples,
    how: Normalize,
    mean: tuple[float, ...] = (),
    std: tuple[float, ...] = (),
) -> TensorSamples | MappedSamples:
    """Samples with normalised inputs.

    By `mean` and `std` as they are given; not at all; or to mean 0 and standard deviation 1 over
    all samples, per channel or per pixel, as ``(x − μ) / (σ + 0.001)``.
    """
    if how == "none" or (how == "given" and not mean and not std):
        return samples
    if how != "given":
        center, spread = moments(samples.inputs, per_pixel=how == "pixel")
        scale = WHITE if samples.inputs.dtype == torch.uint8 else 1
        mean, std = _rounded(center / scale), _rounded((spread + EPSILON) / scale)
    relabel = samples.relabel if isinstance(samples, MappedSamples) else None
    return MappedSamples(samples.inputs, samples.targets, mean, std, relabel)


def _rounded(values: NDArray[np.float64]) -> tuple[float, ...]:
    """To nine digits: a run that continues elsewhere must find the same numbers."""
    return tuple(float(f"{value:.9g}") for value in values)


def moments(inputs: Tensor, *, per_pixel: bool) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Mean and standard deviation over all samples, of every channel or of every pixel."""
    first = inputs[0].numel()
    total, squares = np.zeros(first), np.zeros(first)
    for part in inputs.flatten(1).split(max(1, _AT_ONCE // first)):
        numbers = part.numpy().astype(np.float64)
        total += numbers.sum(axis=0)
        squares += np.square(numbers).sum(axis=0)
    mean, square = total / len(inputs), squares / len(inputs)
    if not per_pixel:
        channels = inputs.shape[1]
        mean, square = (found.reshape(channels, -1).mean(axis=1) for found in (mean, square))
    return mean, np.sqrt(np.maximum(square - mean**2, 0))


Shift: TypeAlias = Literal["none", "noise", "rotation", "blur"]


def shifted(
    samples: TensorSamples | MappedSamples,
    parts: Sequence[Indices],
    kind: Shift,
    level: float,
    seed: int,
) -> TensorSamples | MappedSamples:
    """Samples of which every client's are shifted, and those in no client's part are not.

    Client u of K gets the level ``level · (u + 1) / K``, as NIID-Bench does for noise: the standard
    deviation of Gaussian noise on pixels between 0 and 1, an angle in degrees, or the standard
    deviation of a Gaussian blur in pixels. The shifted images are held in memory.
    """
    if kind == "none" or level == 0:
        return samples
    if samples.inputs.dim() != 4:
        raise DataError(f"shift = '{kind}' needs images")
    if kind == "rotation" and samples.targets.dim() > 1:
        raise DataError("shift = 'rotation' does not rotate label maps; use 'noise' or 'blur'")
    inputs = samples.inputs.clone()
    scale = WHITE if inputs.dtype == torch.uint8 else 1
    for client, part in enumerate(parts):
        where = torch.from_numpy(part)
        images = inputs[where].float() / scale
        strength = level * (client + 1) / len(parts)
        if kind == "noise":
            rng = stream(seed, Purpose.SHIFT, client)
            noise = rng.standard_normal(tuple(images.shape)).astype(np.float32)
            images = images + strength * torch.from_numpy(noise)
        elif kind == "rotation":
            images = _rotated(images, strength)
        else:
            images = _blurred(images, strength)
        if scale == WHITE:
            images = (images * scale).round().clamp(0, scale)
        inputs[where] = images.to(inputs.dtype)
    return replace(samples, inputs=inputs)


def _rotated(images: Tensor, degrees: float) -> Tensor:
    """Images ``[B, C, H, W]`` turned about their middle; what lies outside is black."""
    angle = math.radians(degrees)
    height, width = images.shape[-2:]
    cos, sin = math.cos(angle), math.sin(angle)
    theta = torch.tensor([[cos, -sin * height / width, 0.0], [sin * width / height, cos, 0.0]])
    grid = F.affine_grid(theta.expand(len(images), 2, 3), list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, mode="bilinear", align_corners=False)


def _blurred(images: Tensor, sigma: float) -> Tensor:
    """Images ``[B, C, H, W]`` under a Gaussian filter; edges are repeated outwards.

    The filter reaches 3σ, and no farther than the image's longer side.
    """
    reach = min(max(1, math.ceil(3 * sigma)), max(images.shape[-2:]))
    places = torch.arange(-reach, reach + 1, dtype=torch.float32)
    taps = torch.exp(-0.5 * (places / sigma) ** 2)
    taps = taps / taps.sum()
    channels = images.shape[1]
    padded = F.pad(images, (reach, reach, reach, reach), mode="replicate")
    rows = F.conv2d(padded, taps.view(1, 1, -1, 1).repeat(channels, 1, 1, 1), groups=channels)
    return F.conv2d(rows, taps.view(1, 1, 1, -1).repeat(channels, 1, 1, 1), groups=channels)
