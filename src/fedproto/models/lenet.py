"""The small network of the field's CIFAR benchmarks: two convolutions, three dense layers."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - the name everyone uses

from fedproto.errors import TrainingError
from fedproto.models.base import MODELS, FeatureModel, ModelOptions
from fedproto.options import option

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
