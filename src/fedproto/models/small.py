"""Small networks: the paper's for synthetic data, letters and faces, and the field's LeNet."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - the name everyone uses

from fedproto.models.base import MODELS, FeatureModel, ModelOptions
from fedproto.options import option

_TENSORFLOW_EPS = 1e-3


class MLP(FeatureModel):
    """Two dense layers with ReLU; the output of the second are the features."""

    def __init__(self, inputs: int, hidden: int, features: int, num_classes: int) -> None:
        super().__init__()
        self.dense1 = nn.Linear(inputs, hidden)
        self.dense2 = nn.Linear(hidden, features)
        self.classifier = nn.Linear(features, num_classes)

    def features(self, x: Tensor) -> Tensor:
        """``[B, ...]`` to ``[B, D]``."""
        features: Tensor = self.dense2(self.dense1(x.flatten(1)).relu())
        return features.relu()


@MODELS.register("mlp")
@dataclass(frozen=True)
class MLPOptions(ModelOptions):
    """Two dense layers, for inputs of any shape."""

    hidden: int = option(128, "units of the first layer", at_least=1)
    features: int = option(256, "units of the second layer: the feature channels", at_least=1)

    def build(self, input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
        """Takes flattened inputs."""
        return MLP(math.prod(input_shape), self.hidden, self.features, num_classes)


def _pooled(x: Tensor, *, ceil_mode: bool = False) -> Tensor:
    """2×2 max pooling and ReLU, which gives the same after it on a quarter of the values."""
    return F.max_pool2d(x, 2, ceil_mode=ceil_mode).relu()


class CNN(FeatureModel):
    """Two 5×5 convolutions, each with ReLU and 2×2 max pooling, then dense layers with ReLU.

    The last dense layer before the classifier gives the features.
    """

    def __init__(
        self,
        input_shape: tuple[int, ...],
        channels: tuple[int, int],
        units: Mapping[str, int],
        num_classes: int,
        padding: int,
    ) -> None:
        super().__init__()
        depth, *sides = input_shape
        self.conv1 = nn.Conv2d(depth, channels[0], kernel_size=5, padding=padding)
        self.conv2 = nn.Conv2d(*channels, kernel_size=5, padding=padding)
        lost = 4 - 2 * padding
        inputs = channels[1] * math.prod(((side - lost) // 2 - lost) // 2 for side in sides)
        self._dense = tuple(units)
        for name, number in units.items():
            self.add_module(name, nn.Linear(inputs, number))
            inputs = number
        self.classifier = nn.Linear(inputs, num_classes)

    def features(self, x: Tensor) -> Tensor:
        """``[B, channels, H, W]`` to ``[B, D]``."""
        x = _pooled(self.conv2(_pooled(self.conv1(x)))).flatten(1)
        for name in self._dense:
            x = self.get_submodule(name)(x).relu()
        return x


@MODELS.register("cnn")
@dataclass(frozen=True)
class CNNOptions(ModelOptions):
    """Two convolutions and a dense layer, for images of at least 4×4 pixels.

    The paper does not give the padding; taken: the size is kept, as in the code of LEAF that it
    follows.
    """

    channels1: int = option(32, "channels of the first convolution", at_least=1)
    channels2: int = option(64, "channels of the second convolution", at_least=1)
    features: int = option(256, "units of the dense layer: the feature channels", at_least=1)

    def build(self, input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
        """Takes images as channels × height × width."""
        self.check_images(input_shape, 4)
        channels, units = (self.channels1, self.channels2), {"dense": self.features}
        return CNN(input_shape, channels, units, num_classes, padding=2)


@MODELS.register("lenet")
@dataclass(frozen=True)
class LeNetOptions(ModelOptions):
    """Two 5×5 convolutions and three dense layers, for images of at least 16×16 pixels.

    Without padding, as in the code of FedDyn and of those that compare with it; 797,962 parameters
    for CIFAR-10.
    """

    channels: int = option(64, "channels of each convolution", at_least=1)
    hidden: int = option(384, "units of the first dense layer", at_least=1)
    features: int = option(192, "units of the second dense layer: the feature channels", at_least=1)

    def build(self, input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
        """Takes images as channels × height × width."""
        self.check_images(input_shape, 16)
        channels, units = (self.channels,) * 2, {"dense1": self.hidden, "dense2": self.features}
        return CNN(input_shape, channels, units, num_classes, padding=0)


class CNN4(FeatureModel):
    """Four convolutions, each with 2×2 max pooling and then ReLU; their output are the features.

    The paper gives the channels, the pooling and the activation. Taken where it is silent: 3×3
    kernels and a padding that keeps the size, as in the code of LEAF that it follows; and, since it
    names no dense layer, the flattened output of the last convolution as features.

    LEAF's own has batch normalisation before the pooling, by each batch's own statistics in
    training and tests (with TensorFlow's ε), and pools odd sides to the larger half: 84, 42, 21,
    11 and 6 pixels, so 1,152 features. ``pooling = "valid"`` leaves odd last rows and columns out
    (800 features), ``statistics = "running"`` tests by averages.
    """

    def __init__(
        self, options: CNN4Options, input_shape: tuple[int, ...], num_classes: int
    ) -> None:
        super().__init__()
        self._same = options.pooling == "same"
        depth, height, width = input_shape
        channels = options.channels
        self.convolutions, self.norms = nn.ModuleList(), nn.ModuleList()
        for inputs in (depth, channels, channels, channels):
            self.convolutions.append(nn.Conv2d(inputs, channels, kernel_size=3, padding=1))
            self.norms.append(options.norm())
            height, width = (height + self._same) // 2, (width + self._same) // 2
        self.classifier = nn.Linear(channels * height * width, num_classes)

    def features(self, x: Tensor) -> Tensor:
        """``[B, channels, H, W]`` to ``[B, D]``."""
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            x = _pooled(norm(convolution(x)), ceil_mode=self._same)
        return x.flatten(1)


@MODELS.register("cnn4")
@dataclass(frozen=True)
class CNN4Options(ModelOptions):
    """Four convolutions, for images of at least 16×16 pixels."""

    channels: int = option(32, "channels of each convolution", at_least=1)
    batch_norm: bool = option(False, "batch norm after each convolution, as in LEAF")
    statistics: Literal["running", "batch"] = option(
        "running",
        "batch-norm statistics in tests: running averages, or each batch's own as in LEAF",
    )
    pooling: Literal["valid", "same"] = option(
        "valid", "pooling of odd last rows and columns: left out, or padded as in LEAF"
    )

    def build(self, input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
        """Takes images as channels × height × width."""
        self.check_images(input_shape, 16)
        return CNN4(self, input_shape, num_classes)

    def norm(self) -> nn.Module:
        """The layer after a convolution."""
        if not self.batch_norm:
            return nn.Identity()
        if self.statistics == "running":
            return nn.BatchNorm2d(self.channels)
        return nn.BatchNorm2d(self.channels, eps=_TENSORFLOW_EPS, track_running_stats=False)
