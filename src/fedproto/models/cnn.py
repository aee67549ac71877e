"""The paper's model for MNIST and FEMNIST: two convolutions, a dense layer, a softmax layer."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - the name everyone uses

from fedproto.errors import TrainingError
from fedproto.models.base import MODELS, FeatureModel, ModelOptions
from fedproto.models.layers import Layer, conv_layers, dense_layer
from fedproto.options import option


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
