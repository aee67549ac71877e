"""The paper's model for CelebA: four convolutions and a softmax layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - the name everyone uses

from fedproto.errors import TrainingError
from fedproto.models.base import MODELS, FeatureModel, ModelOptions
from fedproto.models.layers import Layer, conv_layers, dense_layer
from fedproto.options import option

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
