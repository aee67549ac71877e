"""Descriptions of a small model's layers, from which engines build their own forward and backward.

A model describes itself by a method ``layers(input_shape)``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from torch import nn


@dataclass(frozen=True)
class DenseLayer:
    """A dense layer, with ReLU unless it is the last.

    Attributes:
        name: The layer's name in the module; its tensors are ``name.weight`` and ``name.bias``.
        image: Channels, height and width where the input is a flattened image.
    """

    name: str
    inputs: int
    units: int
    image: tuple[int, int, int] | None = None


@dataclass(frozen=True)
class NormLayer:
    """Batch normalisation; the momentum is None without running statistics."""

    name: str
    eps: float
    momentum: float | None


@dataclass(frozen=True)
class ConvLayer:
    """A convolution that keeps the size, perhaps normalised, with ReLU and 2×2 max pooling.

    Attributes:
        taps: Side of the kernel; odd.
        same: Whether an odd last row or column is pooled too, instead of left out.
    """

    name: str
    channels: tuple[int, int]
    image: tuple[int, int]
    taps: int
    same: bool = False
    norm: NormLayer | None = None


Layer: TypeAlias = DenseLayer | ConvLayer


def layers_of(model: nn.Module, input_shape: tuple[int, ...]) -> Sequence[Layer] | None:
    """All layers of a model that describes itself, the last gives the logits; else None.

    A description holds for the very class that has it: a subclass may compute something else.
    """
    if "layers" not in vars(type(model)):
        return None
    described: Sequence[Layer] = model.layers(input_shape)  # type: ignore[operator]
    return described


def describe(
    model: nn.Module,
    input_shape: tuple[int, ...],
    *,
    convolutions: Sequence[str] = (),
    norms: Sequence[str] = (),
    dense: Sequence[str],
    same: bool = False,
) -> list[Layer]:
    """Describes a model by the names of its layers: convolutions in order, then dense layers."""
    found: list[Layer] = []
    image = None
    for index, name in enumerate(convolutions):
        channels, height, width = image or input_shape
        layer = model.get_submodule(name)
        assert isinstance(layer, nn.Conv2d)  # noqa: S101 - narrows the type
        norm = model.get_submodule(norms[index]) if norms else None
        described = None
        if isinstance(norm, nn.BatchNorm2d):
            momentum = norm.momentum if norm.track_running_stats else None
            described = NormLayer(norms[index], norm.eps, momentum)
        sides = (channels, layer.out_channels)
        found.append(ConvLayer(name, sides, (height, width), layer.kernel_size[0], same, described))
        image = (layer.out_channels, (height + same) // 2, (width + same) // 2)
    for name in dense:
        layer = model.get_submodule(name)
        assert isinstance(layer, nn.Linear)  # noqa: S101 - narrows the type
        found.append(DenseLayer(name, layer.in_features, layer.out_features, image))
        image = None
    return found
