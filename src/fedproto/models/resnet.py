"""Residual networks (He et al. 2016) for small images, with batch, group or no normalisation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, TypeAlias

from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - the name everyone uses

from fedproto.errors import ConfigError
from fedproto.models.base import MODELS, FeatureModel, ModelOptions
from fedproto.models.layers import StandardizedConv2d
from fedproto.options import option

Norm: TypeAlias = Literal["group", "batch", "none"]


class BasicBlock(nn.Module):
    """Two 3×3 convolutions, added to their input.

    Where the shape changes, the input passes a 1×1 convolution (`project`), or every second of its
    pixels is taken and new channels are zero, as He et al. do for CIFAR.
    """

    def __init__(self, options: ResNet18Options, channels: int, out: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1, self.bn1 = options.conv(channels, out, 3, stride), options.normalize(out)
        self.conv2, self.bn2 = options.conv(out, out, 3), options.normalize(out)
        self.downsample: nn.Module = nn.Identity()
        if (channels, stride) != (out, 1):
            self.downsample = (
                nn.Sequential(options.conv(channels, out, 1, stride), options.normalize(out))
                if options.project
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

    def __init__(self, options: ResNet18Options, input_channels: int, num_classes: int) -> None:
        super().__init__()
        large, channels = options.stem > 3, options.widths[0]
        self.conv1 = options.conv(input_channels, channels, options.stem, 2 if large else 1)
        self.bn1 = options.normalize(channels)
        self.maxpool = nn.MaxPool2d(3, 2, padding=1) if large else nn.Identity()
        self._stages = len(options.widths)
        for stage, width in enumerate(options.widths, start=1):
            first = BasicBlock(options, channels, width, 1 if stage == 1 else 2)
            rest = [BasicBlock(options, width, width) for _ in range(options.blocks - 1)]
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
        logits: Tensor = self.fc(features)
        return logits


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
    groups: int = option(2, "'group': number of groups of channels", at_least=1)
    standardize: bool = option(False, "weight standardisation of all convolutions")
    stem: Literal[3, 7] = option(
        3, "first convolution: 3×3 for small images, or 7×7 with stride 2 and pooling"
    )

    def build(self, input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
        """Takes images as channels × height × width."""
        self.check_images(input_shape)
        if self.norm == "group" and self.widths[0] % self.groups:
            raise ConfigError(f"model.groups must divide {self.widths[0]}, not {self.groups}")
        return ResNet(self, input_shape[0], num_classes)

    def conv(self, channels: int, out: int, taps: int, stride: int = 1) -> nn.Conv2d:
        """A convolution that keeps the size but for its stride; biased if nothing normalises it."""
        kind = StandardizedConv2d if self.standardize else nn.Conv2d
        return kind(channels, out, taps, stride, padding=taps // 2, bias=self.norm == "none")

    def normalize(self, channels: int) -> nn.Module:
        """The layer after a convolution."""
        if self.norm == "group":
            return nn.GroupNorm(self.groups, channels)
        return nn.BatchNorm2d(channels) if self.norm == "batch" else nn.Identity()


@MODELS.register("resnet20")
@dataclass(frozen=True)
class ResNet20Options(ResNet18Options):
    """ResNet-20 of He et al. for CIFAR: three stages of 16, 32 and 64 channels.

    It has 269,722 parameters for CIFAR-10: where the shape changes, channels are padded with zeros.
    """

    widths = (16, 32, 64)
    blocks = 3
    project = False
