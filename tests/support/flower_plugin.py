"""A model that misbehaves on a node when a test says so, found through FEDPROTO_PLUGINS."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from fedproto.models.base import MODELS
from fedproto.models.small import MLPOptions


@MODELS.register("watched")
@dataclass(frozen=True)
class Watched(MLPOptions):
    """Built by a node right before it trains: the moment to hang or to fail."""

    def build(self, input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
        folder, node = os.environ.get("FEDPROTO_TEST_FOLDER"), os.environ.get("FLWR_HOME", "")
        if folder is not None:
            name = Path(node).name.removeprefix("home-")
            if _taken(Path(folder) / f"hang-{name}"):
                (Path(folder) / f"hanging-{name}").touch()
                time.sleep(300)
            if _taken(Path(folder) / f"fail-{name}"):
                raise RuntimeError("the disk is on fire")
        return super().build(input_shape, num_classes)


def _taken(flag: Path) -> bool:
    """Whether a flag was set; it works once."""
    try:
        flag.unlink()
    except FileNotFoundError:
        return False
    return True
