"""The paper's model for synthetic data: two dense layers and a softmax layer."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor, nn

from fedproto.models.base import MODELS, FeatureModel, ModelOptions
from fedproto.models.layers import Layer, dense_layer
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
