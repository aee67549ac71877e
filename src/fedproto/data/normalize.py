"""Bringing inputs to a common scale, by given numbers or by those of the samples themselves."""

from __future__ import annotations

from typing import Literal, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedproto.data.samples import MappedSamples, Samples, TensorSamples
from fedproto.errors import DataError

Normalize: TypeAlias = Literal["given", "none", "channel", "pixel"]

EPSILON = 1e-3
"""Added to every standard deviation, in the scale of the stored numbers (0 to 255 for bytes)."""

_AT_ONCE = 1 << 24
WHITE = 255


def normalized(
    samples: Samples, how: Normalize, mean: tuple[float, ...] = (), std: tuple[float, ...] = ()
) -> Samples:
    """Samples whose inputs are brought to a common scale.

    By `mean` and `std` as they are given; not at all; or to mean 0 and standard deviation 1 over
    all samples, per channel or per pixel, as ``(x − μ) / (σ + 0.001)``.
    """
    if how == "none" or (how == "given" and not mean and not std):
        return samples
    if not isinstance(samples, TensorSamples | MappedSamples):
        raise DataError(f"normalize = '{how}' needs samples that are held as arrays")
    if how != "given":
        center, spread = moments(samples.inputs, per_pixel=how == "pixel")
        scale = WHITE if samples.inputs.dtype == torch.uint8 else 1
        mean, std = _rounded(center / scale), _rounded((spread + EPSILON) / scale)
    relabel = samples.relabel if isinstance(samples, MappedSamples) else None
    return MappedSamples(samples.inputs, samples.targets, mean, std, relabel)


def _rounded(values: NDArray[np.float64]) -> tuple[float, ...]:
    """To nine digits: a run that goes on elsewhere must find the same numbers."""
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
