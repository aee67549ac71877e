"""DeepLab-V3+ (Chen et al. 2018) on MobileNet-V2: the paper's model for segmentation.

Own code rather than a library's, because those that have this architecture need torchvision.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - the name everyone uses

from fedproto.models.base import MODELS
from fedproto.models.mobilenet import (
    FOR_CLASSIFICATION,
    MobileNetV2,
    PretrainedOptions,
    conv_bn,
    load_pretrained,
)
from fedproto.options import option

_LOW_LEVEL_CHANNELS = 48


class DeepLab(nn.Module):
    """The encoder E is MobileNet-V2 with ASPP, which gives the features; the decoder C follows.

    The decoder also takes low-level features of the encoder, to find the edges of objects.
    """

    def __init__(
        self, backbone: MobileNetV2, channels: int, rates: tuple[int, ...], num_classes: int
    ) -> None:
        super().__init__()
        self.backbone = backbone
        self.aspp = ASPP(backbone.out_channels, channels, rates)
        low = min(channels, _LOW_LEVEL_CHANNELS)
        self.reduce = conv_bn(backbone.low_level_channels, low, 1)
        self.refine = nn.Sequential(
            separable(channels + low, channels), separable(channels, channels)
        )
        self.classifier = nn.Conv2d(channels, num_classes, 1)

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Features ``[B, D, H/16, W/16]`` and low-level features ``[B, L, H/4, W/4]``."""
        coarse, low_level = self.backbone(x)
        return self.aspp(coarse), low_level

    def features(self, x: Tensor) -> Tensor:
        """The encoder's output, ``[B, D, H/16, W/16]``."""
        return self.encode(x)[0]

    def forward(self, x: Tensor) -> Tensor:
        """Logits of every pixel, ``[B, C, H, W]``."""
        features, low_level = self.encode(x)
        fine = self.reduce(low_level)
        both = torch.cat([_resized(features, fine.shape[-2:]), fine], dim=1)
        logits: Tensor = self.classifier(self.refine(both))
        # Under mixed precision the logits are interpolated in the precision of the inputs.
        return _resized(logits.to(x.dtype), x.shape[-2:])


class ASPP(nn.Module):
    """Atrous spatial pyramid pooling: filters of growing reach around a position."""

    def __init__(self, channels: int, out: int, rates: tuple[int, ...]) -> None:
        super().__init__()
        distant = (separable(channels, out, dilation=rate) for rate in rates)
        self.branches = nn.ModuleList([conv_bn(channels, out, 1), *distant])
        self.pooling = conv_bn(channels, out, 1)
        self.project = conv_bn(out * (len(rates) + 2), out, 1)

    def forward(self, x: Tensor) -> Tensor:
        """``[B, channels, h, w]`` to ``[B, out, h, w]``."""
        everywhere = self.pooling(x.mean(dim=(2, 3), keepdim=True)).expand(-1, -1, *x.shape[-2:])
        views = [branch(x) for branch in self.branches]
        found: Tensor = self.project(torch.cat([*views, everywhere], dim=1))
        return found


def separable(channels: int, out: int, dilation: int = 1) -> nn.Sequential:
    """A 3×3 filter of each channel by itself, then a mix of the channels."""
    return nn.Sequential(
        nn.Conv2d(
            channels, channels, 3, padding=dilation, dilation=dilation, groups=channels, bias=False
        ),
        *conv_bn(channels, out, 1),
    )


def _resized(x: Tensor, size: torch.Size) -> Tensor:
    return F.interpolate(x, size, mode="bilinear", align_corners=False)


@MODELS.register("deeplab")
@dataclass(frozen=True)
class DeepLabOptions(PretrainedOptions):
    """DeepLab-V3+ on MobileNet-V2, for segmentation of images of any size."""

    width: float = option(1.0, "multiplier of the encoder's channels", above=0)
    channels: int = option(256, "channels of the features and of the decoder", at_least=1)
    rates: tuple[int, ...] = option((6, 12, 18), "dilations of the ASPP's branches")
    output_stride: Literal[8, 16, 32] = option(16, "ratio of the input's size to the feature map's")

    def build(self, input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
        """Takes images as channels × height × width."""
        self.check_images(input_shape, 16)
        backbone = MobileNetV2(input_shape[0], self.width, self.output_stride)
        model = DeepLab(backbone, self.channels, self.rates, num_classes)
        for module in model.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out")
        nn.init.normal_(model.classifier.weight, std=0.01)
        load_pretrained(backbone, self.pretrained, FOR_CLASSIFICATION)
        return model


@MODELS.register("deeplab-small")
@dataclass(frozen=True)
class SmallDeepLabOptions(DeepLabOptions):
    """DeepLab-V3+ with few channels, for small images on a CPU."""

    width: float = 0.25
    channels: int = 32
    rates: tuple[int, ...] = (1, 2)
    output_stride: Literal[8, 16, 32] = 8
