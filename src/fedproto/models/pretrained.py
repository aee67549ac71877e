"""Pretrained weights: read from a file or from torchvision, and checked name by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from fedproto.data.base import data_root
from fedproto.disk.files import user_path
from fedproto.errors import ConfigError, reason_of
from fedproto.models.base import ModelOptions
from fedproto.options import option

_SHOWN = 3


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


def load_pretrained(
    module: nn.Module, source: str, architecture: str, unused: Sequence[str] = ()
) -> None:
    """Puts pretrained weights into a module.

    `source` is ``torchvision``, or a ``.safetensors`` or ``.pth`` file, looked for from the current
    folder and then in the data root. Names that begin with a prefix in
    `unused` are ignored.
    """
    found = _from_torchvision(architecture) if source == "torchvision" else _from_file(source)
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


def _from_torchvision(architecture: str) -> Mapping[str, Tensor]:
    try:
        from torchvision.models import get_model
    except (ImportError, RuntimeError):
        raise ConfigError(
            "pretrained = 'torchvision' needs a torchvision that fits this PyTorch; install one or"
            " give a file"
        ) from None
    try:
        model: nn.Module = get_model(architecture, weights="DEFAULT")
    except OSError as error:
        raise ConfigError(f"torchvision cannot download the weights: {error}") from None
    return model.state_dict()


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
