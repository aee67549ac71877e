"""What a small model is made of, layer by layer: what engines with own passes build theirs from.

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
    """Batch normalisation.

    Attributes:
        momentum: What a batch's statistics count in the running ones; None where there are none.
    """

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
    """All layers of a model that describes itself, the last gives the scores; or None.

    A description holds for the very class that has it: a subclass may compute something else.
    """
    if "layers" not in vars(type(model)):
        return None
    described: Sequence[Layer] = model.layers(input_shape)  # type: ignore[operator]
    return described


def dense_layer(
    name: str, layer: nn.Linear, image: tuple[int, int, int] | None = None
) -> DenseLayer:
    """The description of a dense layer."""
    return DenseLayer(name, layer.in_features, layer.out_features, image)


def conv_layers(
    input_shape: tuple[int, ...],
    convolutions: Sequence[tuple[str, nn.Module]],
    norms: Sequence[tuple[str, nn.Module]] = (),
    *,
    same: bool = False,
) -> tuple[list[ConvLayer], tuple[int, int, int]]:
    """The descriptions of convolutions one after another, and the image that comes out.

    A module among `norms` that is no batch normalisation does nothing.
    """
    channels, height, width = input_shape
    found: list[ConvLayer] = []
    for index, (name, layer) in enumerate(convolutions):
        assert isinstance(layer, nn.Conv2d)  # noqa: S101 - narrows the type
        norm = _norm_layer(*norms[index]) if norms else None
        sides = (layer.in_channels, layer.out_channels)
        found.append(ConvLayer(name, sides, (height, width), layer.kernel_size[0], same, norm))
        channels, height, width = sides[1], (height + same) // 2, (width + same) // 2
    return found, (channels, height, width)


def _norm_layer(name: str, layer: nn.Module) -> NormLayer | None:
    if not isinstance(layer, nn.BatchNorm2d):
        return None
    return NormLayer(name, layer.eps, layer.momentum if layer.track_running_stats else None)
