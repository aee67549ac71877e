"""Feature shift: images of different clients differ in noise, rotation or blur, not in classes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - the name everyone uses

from fedproto.data.normalize import WHITE
from fedproto.data.samples import MappedSamples, Samples, TensorSamples
from fedproto.errors import DataError
from fedproto.rng import Indices, Purpose, stream

Shift: TypeAlias = Literal["none", "noise", "rotation", "blur"]


def shifted(
    samples: Samples, parts: Sequence[Indices], kind: Shift, level: float, seed: int
) -> Samples:
    """Samples of which every client's are shifted, and those in no client's part are not.

    Client u of K gets the level ``level · (u + 1) / K``, as NIID-Bench does for noise: the standard
    deviation of Gaussian noise on pixels between 0 and 1, an angle in degrees, or the standard
    deviation of a Gaussian blur in pixels. The shifted images are held in memory.
    """
    if kind == "none" or level == 0:
        return samples
    if not isinstance(samples, TensorSamples | MappedSamples) or samples.inputs.dim() != 4:
        raise DataError(f"shift = '{kind}' needs images")
    if kind == "rotation" and samples.targets.dim() > 1:
        raise DataError("shift = 'rotation' does not turn label maps; choose 'noise' or 'blur'")
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
        else:
            images = (
                _rotated(images, strength) if kind == "rotation" else _blurred(images, strength)
            )
        if scale == WHITE:
            images = (images * scale).round().clamp(0, scale)
        inputs[where] = images.to(inputs.dtype)
    if isinstance(samples, TensorSamples):
        return TensorSamples(inputs, samples.targets)
    return MappedSamples(inputs, samples.targets, samples.mean, samples.std, samples.relabel)


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
