"""Label maps and heat maps as PNG files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from fedproto.data.masks import palette
from fedproto.disk.atomic import explained
from fedproto.errors import DataError

if TYPE_CHECKING:
    from PIL.Image import Image

# From dark blue to yellow, told apart with all common kinds of colour vision.
_HEAT = np.array(
    [(0, 34, 78), (65, 77, 107), (124, 123, 120), (188, 175, 111), (254, 232, 56)], dtype=np.float64
)


def save_labels(labels: NDArray[np.uint8], path: Path) -> Path:
    """Writes a label map ``[H, W]`` as PASCAL VOC does: the classes, with its palette."""
    from PIL import Image

    picture = Image.fromarray(labels)
    picture.putpalette(palette().tobytes())
    return _save(picture, path)


def save_heat(values: NDArray[np.float64], path: Path) -> Path:
    """Writes values between 0 (dark blue) and 1 (yellow), ``[H, W]``."""
    from PIL import Image

    levels = np.linspace(0, 1, len(_HEAT))
    colours = np.stack([np.interp(values, levels, _HEAT[:, channel]) for channel in range(3)], -1)
    return _save(Image.fromarray(np.rint(colours).astype(np.uint8)), path)


def save_picture(pixels: NDArray[np.uint8], path: Path) -> Path:
    """Writes a picture ``[H, W, channels]`` of one or three channels."""
    from PIL import Image

    return _save(Image.fromarray(pixels[..., 0] if pixels.shape[-1] == 1 else pixels), path)


def _save(picture: Image, path: Path) -> Path:
    with explained(path, " cannot be written", "", DataError):
        picture.save(path)
    return path
