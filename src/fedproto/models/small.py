"""Small networks: the paper's for synthetic data, letters and faces, and the field's LeNet."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, TypeAlias

from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - the name everyone uses

from fedproto.errors import TrainingError
from fedproto.models.base import MODELS, FeatureModel, ModelOptions
from fedproto.models.layers import Layer, conv_layers, dense_layer
from fedproto.options import option


class MLP(FeatureModel):
    """Two dense layers with ReLU; the second one's output are the features."""

    def __init__(self, inputs: int, hidden: int, features: int, num_classes: int) -> None:
        super().__init__()
        self.dense1 = nn.Linear(inputs, hidden)
        self.dense2 = nn.Linear(hidden, features)
        self.classifier = nn.Linear(features, num_classes)

    def features(self, x: Tensor) -> Tensor:
        """``[B, ...]`` to ``[B, D]``."""
        features: Tensor = self.dense2(self.dense1(x.flatten(1)).relu())
        return features.relu()

    def head(self, features: Tensor) -> Tensor:
        """``[B, D]`` to ``[B, C]``."""
        scores: Tensor = self.classifier(features)
        return scores

    def layers(self, input_shape: tuple[int, ...]) -> list[Layer]:
        """Three dense layers."""
        del input_shape
        return [
            dense_layer("dense1", self.dense1),
            dense_layer("dense2", self.dense2),
            dense_layer("classifier", self.classifier),
        ]


@MODELS.register("mlp")
@dataclass(frozen=True)
class MLPOptions(ModelOptions):
    """Two dense layers, for inputs of any shape."""

    hidden: int = option(128, "units of the first layer", at_least=1)
    features: int = option(256, "units of the second layer: the feature channels", at_least=1)

    def build(self, input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
        """Takes flattened inputs."""
        return MLP(math.prod(input_shape), self.hidden, self.features, num_classes)


class CNN(FeatureModel):
    """5×5 convolutions, each with ReLU and 2×2 max pooling; the dense layer gives the features.

    The paper does not give the padding; taken: the size is kept, as in the code of LEAF that it
    follows.
    """

    def __init__(
        self,
        input_shape: tuple[int, ...],
        channels: tuple[int, int],
        features: int,
        num_classes: int,
    ) -> None:
        super().__init__()
        depth, height, width = input_shape
        self.conv1 = nn.Conv2d(depth, channels[0], kernel_size=5, padding=2)
        self.conv2 = nn.Conv2d(channels[0], channels[1], kernel_size=5, padding=2)
        self.dense = nn.Linear(channels[1] * (height // 4) * (width // 4), features)
        self.classifier = nn.Linear(features, num_classes)

    def features(self, x: Tensor) -> Tensor:
        """``[B, channels, H, W]`` to ``[B, D]``."""
        # ReLU after pooling gives the same as before it, on a quarter of the values.
        x = F.max_pool2d(self.conv1(x), 2).relu()
        x = F.max_pool2d(self.conv2(x), 2).relu()
        features: Tensor = self.dense(x.flatten(1))
        return features.relu()

    def head(self, features: Tensor) -> Tensor:
        """``[B, D]`` to ``[B, C]``."""
        scores: Tensor = self.classifier(features)
        return scores

    def layers(self, input_shape: tuple[int, ...]) -> list[Layer]:
        """Two convolutions and two dense layers."""
        named = [("conv1", self.conv1), ("conv2", self.conv2)]
        convolutions, image = conv_layers(input_shape, named)
        return [
            *convolutions,
            dense_layer("dense", self.dense, image),
            dense_layer("classifier", self.classifier),
        ]


@MODELS.register("cnn")
@dataclass(frozen=True)
class CNNOptions(ModelOptions):
    """Two convolutions and a dense layer, for images of at least 4×4 pixels."""

    channels1: int = option(32, "channels of the first convolution", at_least=1)
    channels2: int = option(64, "channels of the second convolution", at_least=1)
    features: int = option(256, "units of the dense layer: the feature channels", at_least=1)

    def build(self, input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
        """Takes images as channels × height × width."""
        if len(input_shape) != 3 or min(input_shape[1:]) < 4:
            raise TrainingError(
                f"model 'cnn' needs images (channels, height, width) of at least 4×4 pixels, not"
                f" inputs of shape {input_shape}; use model 'mlp'"
            )
        return CNN(input_shape, (self.channels1, self.channels2), self.features, num_classes)


_LAYERS = 4
_SHRINK = 2**_LAYERS
_TENSORFLOW_EPS = 1e-3

Pooling: TypeAlias = Literal["valid", "same"]
Statistics: TypeAlias = Literal["running", "batch"]


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
        self,
        input_shape: tuple[int, ...],
        channels: int,
        num_classes: int,
        *,
        batch_norm: bool = False,
        statistics: Statistics = "running",
        pooling: Pooling = "valid",
    ) -> None:
        super().__init__()
        self.pooling, self.batch_norm = pooling, batch_norm
        depth, height, width = input_shape
        self.convolutions = nn.ModuleList(
            nn.Conv2d(depth if layer == 0 else channels, channels, kernel_size=3, padding=1)
            for layer in range(_LAYERS)
        )
        self.norms = nn.ModuleList(
            _norm(channels, statistics) if batch_norm else nn.Identity() for _ in range(_LAYERS)
        )
        for _ in range(_LAYERS):
            height, width = ((side + (pooling == "same")) // 2 for side in (height, width))
        self.classifier = nn.Linear(channels * height * width, num_classes)

    def features(self, x: Tensor) -> Tensor:
        """``[B, channels, H, W]`` to ``[B, D]``."""
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            x = F.max_pool2d(norm(convolution(x)), 2, ceil_mode=self.pooling == "same").relu()
        return x.flatten(1)

    def head(self, features: Tensor) -> Tensor:
        """``[B, D]`` to ``[B, C]``."""
        scores: Tensor = self.classifier(features)
        return scores

    def layers(self, input_shape: tuple[int, ...]) -> list[Layer]:
        """Four convolutions and a dense layer."""
        convolutions, image = conv_layers(
            input_shape,
            [(f"convolutions.{index}", one) for index, one in self.convolutions.named_children()],
            [(f"norms.{index}", one) for index, one in self.norms.named_children()],
            same=self.pooling == "same",
        )
        return [*convolutions, dense_layer("classifier", self.classifier, image)]


def _norm(channels: int, statistics: Statistics) -> nn.BatchNorm2d:
    if statistics == "running":
        return nn.BatchNorm2d(channels)
    return nn.BatchNorm2d(channels, eps=_TENSORFLOW_EPS, track_running_stats=False)


@MODELS.register("cnn4")
@dataclass(frozen=True)
class CNN4Options(ModelOptions):
    """Four convolutions, for images of at least 16×16 pixels."""

    channels: int = option(32, "channels of each convolution", at_least=1)
    batch_norm: bool = option(False, "normalise after each convolution, as LEAF does")
    statistics: Statistics = option(
        "running", "what tests normalise by: averages, or each batch's own as in LEAF (never sent)"
    )
    pooling: Pooling = option("valid", "odd last rows and columns: left out, or pooled as in LEAF")

    def build(self, input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
        """Takes images as channels × height × width."""
        if len(input_shape) != 3 or min(input_shape[1:]) < _SHRINK:
            raise TrainingError(
                f"model 'cnn4' needs images (channels, height, width) of at least"
                f" {_SHRINK}×{_SHRINK} pixels, not inputs of shape {input_shape}; use model 'mlp'"
            )
        return CNN4(
            input_shape,
            self.channels,
            num_classes,
            batch_norm=self.batch_norm,
            statistics=self.statistics,
            pooling=self.pooling,
        )


_TAPS, _SMALLEST = 5, 16


class LeNet(FeatureModel):
    """5×5 convolutions without padding, each with ReLU and 2×2 max pooling, then dense layers.

    The last dense layer before the classifier gives the features. As in the code of FedDyn and of
    those that compare with it; 797,962 parameters for CIFAR-10.
    """

    def __init__(
        self,
        input_shape: tuple[int, ...],
        channels: int,
        units: tuple[int, int],
        num_classes: int,
    ) -> None:
        super().__init__()
        depth, *sides = input_shape
        height, width = (((side - _TAPS + 1) // 2 - _TAPS + 1) // 2 for side in sides)
        self.conv1 = nn.Conv2d(depth, channels, _TAPS)
        self.conv2 = nn.Conv2d(channels, channels, _TAPS)
        self.dense1 = nn.Linear(channels * height * width, units[0])
        self.dense2 = nn.Linear(*units)
        self.classifier = nn.Linear(units[1], num_classes)

    def features(self, x: Tensor) -> Tensor:
        """``[B, channels, H, W]`` to ``[B, D]``."""
        # ReLU after pooling gives the same as before it, on a quarter of the values.
        x = F.max_pool2d(self.conv1(x), 2).relu()
        x = F.max_pool2d(self.conv2(x), 2).relu()
        features: Tensor = self.dense2(self.dense1(x.flatten(1)).relu())
        return features.relu()

    def head(self, features: Tensor) -> Tensor:
        """``[B, D]`` to ``[B, C]``."""
        scores: Tensor = self.classifier(features)
        return scores


@MODELS.register("lenet")
@dataclass(frozen=True)
class LeNetOptions(ModelOptions):
    """Two 5×5 convolutions and three dense layers, for images of at least 16×16 pixels."""

    channels: int = option(64, "channels of each convolution", at_least=1)
    hidden: int = option(384, "units of the first dense layer", at_least=1)
    features: int = option(192, "units of the second dense layer: the feature channels", at_least=1)

    def build(self, input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
        """Takes images as channels × height × width."""
        if len(input_shape) != 3 or min(input_shape[1:]) < _SMALLEST:
            raise TrainingError(
                "model 'lenet' needs images (channels, height, width) of at least"
                f" {_SMALLEST}×{_SMALLEST} pixels, not inputs of shape {input_shape}"
            )
        return LeNet(input_shape, self.channels, (self.hidden, self.features), num_classes)
