"""Normalisation of inputs, and feature shift between clients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - the name everyone uses

from fedproto.data.samples import MappedSamples, TensorSamples
from fedproto.errors import DataError
from fedproto.rng import Indices, Purpose, stream

Normalize: TypeAlias = Literal["given", "none", "channel", "pixel"]

EPSILON = 1e-3
"""Added to every standard deviation, in the scale of the stored numbers (0 to 255 for bytes)."""

_AT_ONCE = 1 << 24
WHITE = 255


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
    """Images ``[B, C, H, W]`` under a Gaussian filter; edges are repeated outwards."""
    reach = max(1, math.ceil(3 * sigma))
    places = torch.arange(-reach, reach + 1, dtype=torch.float32)
    taps = torch.exp(-0.5 * (places / sigma) ** 2)
    taps = taps / taps.sum()
    channels = images.shape[1]
    padded = F.pad(images, (reach, reach, reach, reach), mode="replicate")
    rows = F.conv2d(padded, taps.view(1, 1, -1, 1).repeat(channels, 1, 1, 1), groups=channels)
    return F.conv2d(rows, taps.view(1, 1, 1, -1).repeat(channels, 1, 1, 1), groups=channels)
