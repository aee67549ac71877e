"""Residual networks (He et al. 2016) for small images, with batch, group or no normalisation."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal, TypeAlias

from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - the name everyone uses

from fedproto.errors import ConfigError, TrainingError
from fedproto.models.base import MODELS, FeatureModel, ModelOptions
from fedproto.options import option

Norm: TypeAlias = Literal["group", "batch", "none"]
_EPSILON = 1e-5


class StandardizedConv2d(nn.Conv2d):
    """A convolution with weight standardisation (Qiao et al. 2019).

    Every filter is used as ``(w − mean) / (std + ε)`` over its inputs and taps.
    """

    def forward(self, x: Tensor) -> Tensor:
        """``[B, channels, H, W]`` to ``[B, out, H / stride, W / stride]``."""
        filters = self.weight.flatten(1)
        centred = filters - filters.mean(dim=1, keepdim=True)
        weight = (centred / (filters.std(dim=1, keepdim=True) + _EPSILON)).view_as(self.weight)
        return F.conv2d(x, weight, self.bias, self.stride, self.padding)


@dataclass(frozen=True)
class Layers:
    """Which convolutions and normalising layers a network is made of."""

    norm: Norm
    groups: int
    standardize: bool

    def conv(self, channels: int, out: int, taps: int, stride: int = 1) -> nn.Conv2d:
        """A convolution that keeps the size but for its stride; biased if nothing normalises it."""
        kind = StandardizedConv2d if self.standardize else nn.Conv2d
        return kind(channels, out, taps, stride, padding=taps // 2, bias=self.norm == "none")

    def normalize(self, channels: int) -> nn.Module:
        """The layer after a convolution."""
        if self.norm == "group":
            return nn.GroupNorm(self.groups, channels)
        return nn.BatchNorm2d(channels) if self.norm == "batch" else nn.Identity()


class BasicBlock(nn.Module):
    """Two 3×3 convolutions, added to their input.

    Where the shape changes, the input passes a 1×1 convolution (`project`), or every second of its
    pixels is taken and new channels are zero, as He et al. do for CIFAR.
    """

    def __init__(
        self, layers: Layers, channels: int, out: int, stride: int, *, project: bool
    ) -> None:
        super().__init__()
        self.conv1, self.bn1 = layers.conv(channels, out, 3, stride), layers.normalize(out)
        self.conv2, self.bn2 = layers.conv(out, out, 3), layers.normalize(out)
        self.downsample: nn.Module = nn.Identity()
        if (channels, stride) != (out, 1):
            self.downsample = (
                nn.Sequential(layers.conv(channels, out, 1, stride), layers.normalize(out))
                if project
                else _Padded(stride, out - channels)
            )

    def forward(self, x: Tensor) -> Tensor:
        """``[B, channels, H, W]`` to ``[B, out, H / stride, W / stride]``."""
        y = self.bn1(self.conv1(x)).relu()
        found: Tensor = self.bn2(self.conv2(y)) + self.downsample(x)
        return found.relu()


class _Padded(nn.Module):
    def __init__(self, stride: int, more: int) -> None:
        super().__init__()
        self._stride, self._more = stride, more

    def forward(self, x: Tensor) -> Tensor:
        return F.pad(x[:, :, :: self._stride, :: self._stride], (0, 0, 0, 0, 0, self._more))


class ResNet(FeatureModel):
    """Stages of basic blocks; the mean over all positions gives the features.

    Modules have the names of torchvision's ResNet.
    """

    def __init__(
        self,
        layers: Layers,
        input_channels: int,
        num_classes: int,
        *,
        widths: tuple[int, ...],
        blocks: int,
        stem: int,
        project: bool,
    ) -> None:
        super().__init__()
        large = stem > 3
        self.conv1 = layers.conv(input_channels, widths[0], stem, 2 if large else 1)
        self.bn1 = layers.normalize(widths[0])
        self.maxpool = nn.MaxPool2d(3, 2, padding=1) if large else nn.Identity()
        block, channels = partial(BasicBlock, layers, project=project), widths[0]
        self._stages = len(widths)
        for stage, width in enumerate(widths, start=1):
            first = block(channels, width, 1 if stage == 1 else 2)
            rest = [block(width, width, 1) for _ in range(blocks - 1)]
            self.add_module(f"layer{stage}", nn.Sequential(first, *rest))
            channels = width
        self.fc = nn.Linear(channels, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def features(self, x: Tensor) -> Tensor:
        """``[B, channels, H, W]`` to ``[B, D]``."""
        x = self.maxpool(self.bn1(self.conv1(x)).relu())
        for stage in range(1, self._stages + 1):
            x = self.get_submodule(f"layer{stage}")(x)
        return x.mean(dim=(2, 3))

    def head(self, features: Tensor) -> Tensor:
        """``[B, D]`` to ``[B, C]``."""
        scores: Tensor = self.fc(features)
        return scores


@MODELS.register("resnet18")
@dataclass(frozen=True)
class ResNet18Options(ModelOptions):
    """ResNet-18, by default with GroupNorm and a 3×3 first convolution, for small images.

    It has 11,173,962 parameters for CIFAR-10, under batch or group normalisation.
    """

    widths: ClassVar[tuple[int, ...]] = (64, 128, 256, 512)
    blocks: ClassVar[int] = 2
    project: ClassVar[bool] = True

    norm: Norm = option("group", "normalisation after every convolution")
    groups: int = option(2, "'group': groups of channels", at_least=1)
    standardize: bool = option(False, "weight standardisation of all convolutions")
    stem: Literal[3, 7] = option(
        3, "first convolution: 3×3 for small images, or 7×7 with stride 2 and pooling"
    )

    def build(self, input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
        """Takes images as channels × height × width."""
        if len(input_shape) != 3:
            raise TrainingError(
                f"model '{MODELS.name_of(type(self))}' needs images (channels, height, width), not"
                f" inputs of shape {input_shape}; use model 'mlp'"
            )
        if self.norm == "group" and self.widths[0] % self.groups:
            raise ConfigError(f"model.groups must divide {self.widths[0]}, not {self.groups}")
        return ResNet(
            Layers(self.norm, self.groups, self.standardize),
            input_shape[0],
            num_classes,
            widths=self.widths,
            blocks=self.blocks,
            stem=self.stem,
            project=self.project,
        )


@MODELS.register("resnet20")
@dataclass(frozen=True)
class ResNet20Options(ResNet18Options):
    """ResNet-20 of He et al. for CIFAR: three stages of 16, 32 and 64 channels.

    It has 269,722 parameters for CIFAR-10: where the shape changes, channels are padded with zeros.
    """

    widths = (16, 32, 64)
    blocks = 3
    project = False
