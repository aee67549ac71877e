"""MobileNet-V2 (Sandler et al. 2018), as a classifier and as an encoder for dense prediction.

Modules have the names of torchvision's model, so that its weights fit: ``features.0`` is the first
convolution and ``features.1`` to ``features.17`` are the inverted residuals. ``features.18``, a
last convolution, serves classification alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - the name everyone uses

from fedproto.data.base import data_root
from fedproto.disk.files import user_path
from fedproto.errors import ConfigError, reason_of
from fedproto.models.base import MODELS, FeatureModel, ModelOptions
from fedproto.options import option

# Expansion, output channels, blocks and stride of each stage, as in the paper's Table 2.
_STAGES = (
    (1, 16, 1, 1),
    (6, 24, 2, 2),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)
_LOW_LEVEL_STAGE = 1
_LAST = 1280
_SHOWN = 3
FOR_CLASSIFICATION = ("features.18.", "classifier.")
"""Prefixes of the weights that a dense prediction does not use."""


class MobileNetV2(nn.Module):
    """The encoder: images to a coarse map of features and a fine one of low-level features.

    One position of the coarse map stands for `output_stride` pixels of the image; stages that would
    shrink the map further are dilated instead. `classify` adds the last convolution.
    """

    def __init__(
        self,
        input_channels: int = 3,
        width: float = 1.0,
        output_stride: int = 16,
        *,
        classify: bool = False,
    ) -> None:
        super().__init__()
        channels = _rounded(32 * width)
        layers: list[nn.Module] = [_conv6(input_channels, channels, 3, stride=2)]
        stride_so_far, dilation = 2, 1
        for stage, (expansion, base, blocks, stage_stride) in enumerate(_STAGES):
            stride, first_dilation = stage_stride, dilation
            if stride_so_far * stage_stride > output_stride:
                stride = 1
                dilation *= stage_stride
            stride_so_far *= stride
            out = _rounded(base * width)
            layers.append(InvertedResidual(channels, out, stride, expansion, first_dilation))
            layers += [
                InvertedResidual(out, out, 1, expansion, dilation) for _ in range(blocks - 1)
            ]
            channels = out
            if stage == _LOW_LEVEL_STAGE:
                self._low_level_end = len(layers)
                self.low_level_channels = channels
        if classify:
            last = _rounded(_LAST * max(1.0, width))
            layers.append(_conv6(channels, last, 1))
            channels = last
        self.out_channels = channels
        self.features = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The coarse map, and the low-level features at a quarter of the images' size."""
        low_level: Tensor = self.features[: self._low_level_end](x)
        return self.features[self._low_level_end :](low_level), low_level


class InvertedResidual(nn.Module):
    """Widens, filters each channel by itself, narrows again; added to its input if it fits."""

    def __init__(self, channels: int, out: int, stride: int, expansion: int, dilation: int) -> None:
        super().__init__()
        hidden = channels * expansion
        widen = [_conv6(channels, hidden, 1)] if expansion != 1 else []
        self.conv = nn.Sequential(
            *widen,
            _conv6(hidden, hidden, 3, stride=stride, dilation=dilation, groups=hidden),
            nn.Conv2d(hidden, out, 1, bias=False),
            nn.BatchNorm2d(out),
        )
        self._residual = stride == 1 and channels == out

    def forward(self, x: Tensor) -> Tensor:
        """``[B, channels, H, W]`` to ``[B, out, H / stride, W / stride]``."""
        y: Tensor = self.conv(x)
        return x + y if self._residual else y


def conv_bn(
    channels: int,
    out: int,
    kernel: int,
    activation: type[nn.ReLU | nn.ReLU6] = nn.ReLU,
    *,
    stride: int = 1,
    dilation: int = 1,
    groups: int = 1,
) -> nn.Sequential:
    """A convolution that keeps the size but for its stride, batch norm and an activation."""
    padding = dilation * (kernel - 1) // 2
    return nn.Sequential(
        nn.Conv2d(channels, out, kernel, stride, padding, dilation, groups, bias=False),
        nn.BatchNorm2d(out),
        activation(inplace=True),
    )


def _conv6(channels: int, out: int, kernel: int, **options: int) -> nn.Sequential:
    return conv_bn(channels, out, kernel, nn.ReLU6, **options)


def _rounded(channels: float, divisor: int = 8) -> int:
    """The nearest multiple of 8, but never a tenth below what was asked for, as in the original."""
    nearest = max(divisor, int(channels + divisor / 2) // divisor * divisor)
    return nearest + divisor if nearest < 0.9 * channels else nearest


@dataclass(frozen=True)
class PretrainedOptions(ModelOptions):
    """An architecture whose encoder can start from ImageNet's weights."""

    pretrained: str = option(
        "none",
        "ImageNet weights of the encoder: 'none', a .safetensors or .pth file in torchvision's key"
        " names (also looked for in the data root), or 'torchvision'",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.init == "glorot" and self.pretrained != "none":
            raise ConfigError("init = 'glorot' would replace 'pretrained' weights; set one of them")

    def untrained(self) -> ModelOptions:
        """Without ImageNet's weights."""
        return replace(self, pretrained="none")


def load_pretrained(module: nn.Module, source: str, unused: Sequence[str] = ()) -> None:
    """Puts pretrained weights into a module, checked name by name.

    `source` is ``none``, ``torchvision``, or a ``.safetensors`` or ``.pth`` file,
    looked for from the current folder and then in the data root. Names that begin with a prefix in
    `unused` are ignored.
    """
    if source == "none":
        return
    found = _from_torchvision() if source == "torchvision" else _from_file(source)
    given = {name: value for name, value in found.items() if not name.startswith(tuple(unused))}
    own = module.state_dict()
    # Counters of batches are of no use to a new training, and old files have none.
    needed = {name for name in own if not name.endswith("num_batches_tracked")}
    both = [(name, value, own[name]) for name, value in given.items() if name in own]
    faults = {
        "lack": sorted(needed - given.keys()),
        "have extra": sorted(given.keys() - own.keys()),
        "have non-floating-point values in": [
            f"{name} ({str(value.dtype).removeprefix('torch.')})"
            for name, value, wanted in both
            if wanted.is_floating_point() > value.is_floating_point()
        ],
        "have misshapen": [
            f"{name} {list(value.shape)} instead of {list(wanted.shape)}"
            for name, value, wanted in both
            if value.shape != wanted.shape
        ],
    }
    complaints = [f"{fault} {_some(names)}" for fault, names in faults.items() if names]
    if complaints:
        raise ConfigError(
            f"the pretrained weights of {source} do not fit: they {'; they '.join(complaints)}"
        )
    module.load_state_dict(own | {name: value.to(wanted.dtype) for name, value, wanted in both})


def _from_file(source: str) -> Mapping[str, Tensor]:
    path = user_path(source, data_root())
    if path is None or not path.is_file():
        raise ConfigError(
            f"there are no pretrained weights in {source}, nor below {data_root()}; give a"
            " .safetensors or .pth file, 'torchvision' or 'none'"
        )
    try:
        content: Any = (
            load_file(path)
            if path.suffix == ".safetensors"
            else torch.load(path, map_location="cpu", weights_only=True)
        )
    # What a damaged file raises depends on what its bytes happen to ask for.
    except Exception as error:  # noqa: BLE001
        raise ConfigError(f"pretrained weights {path} cannot be read: {reason_of(error)}") from None
    if not isinstance(content, Mapping) or not all(
        isinstance(value, Tensor) for value in content.values()
    ):
        raise ConfigError(f"{path} contains no named tensors; save a model's state_dict() in it")
    for name, value in content.items():
        if value.is_floating_point() and not bool(torch.isfinite(value).all()):
            raise ConfigError(
                f"pretrained weights {path}: '{name}' contains NaN or infinite numbers"
            )
    return content


def _from_torchvision() -> Mapping[str, Tensor]:
    try:
        from torchvision.models import get_model
    except (ImportError, RuntimeError):
        raise ConfigError(
            "pretrained = 'torchvision' needs a torchvision that fits this PyTorch; install one or"
            " give a file"
        ) from None
    try:
        model: nn.Module = get_model("mobilenet_v2", weights="DEFAULT")
    except OSError as error:
        raise ConfigError(f"torchvision cannot download the weights: {error}") from None
    return model.state_dict()


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


class MobileNetClassifier(FeatureModel):
    """The mean over all positions of the last convolution gives the features, one layer the logits.

    Where the encoder is frozen it stays as in a test, and only the classifier is trained.
    """

    def __init__(
        self, backbone: MobileNetV2, num_classes: int, resize: int, *, frozen: bool
    ) -> None:
        super().__init__()
        self.backbone = backbone.requires_grad_(not frozen)
        self.classifier = nn.Linear(backbone.out_channels, num_classes)
        self._resize, self._frozen = resize, frozen

    def train(self, mode: bool = True) -> MobileNetClassifier:
        """A frozen encoder normalises by the statistics it came with."""
        super().train(mode)
        self.backbone.train(mode and not self._frozen)
        return self

    def features(self, x: Tensor) -> Tensor:
        """``[B, channels, H, W]`` to ``[B, D]``."""
        if self._resize:
            x = F.interpolate(x, (self._resize, self._resize), mode="bilinear", align_corners=False)
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self._frozen):
            coarse, _ = self.backbone(x)
            return cast("Tensor", coarse.mean(dim=(2, 3)))


@MODELS.register("mobilenetv2")
@dataclass(frozen=True)
class MobileNetOptions(PretrainedOptions):
    """MobileNet-V2 as a classifier, with ImageNet's weights if they are given.

    It has 3,504,872 parameters for 1,000 classes and gives 1,280 features.
    """

    width: float = option(1.0, "multiplier of the channels", above=0)
    frozen: bool = option(False, "freeze the encoder and train the classifier alone")
    resize: int = option(
        0, "width and height to which inputs are resized, in pixels; 0 for none", at_least=0
    )

    def build(self, input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
        """Takes images as channels × height × width."""
        self.check_images(input_shape)
        backbone = MobileNetV2(input_shape[0], self.width, output_stride=32, classify=True)
        for module in backbone.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out")
        load_pretrained(backbone, self.pretrained, ("classifier.",))
        return MobileNetClassifier(backbone, num_classes, self.resize, frozen=self.frozen)
