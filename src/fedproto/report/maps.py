"""Label maps and heat maps as PNG files: of a model, and beside the picture and the truth."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fedproto.analysis.entropy import feature_entropy, relative, softmax_entropy, upsampled
from fedproto.analysis.probe import Probe
from fedproto.data.masks import palette
from fedproto.data.samples import MappedSamples, Samples
from fedproto.disk.files import explained, write_atomically
from fedproto.errors import DataError
from fedproto.types import ServerState

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
        content = io.BytesIO()
        picture.save(content, "PNG")
        write_atomically(path, content.getvalue())
    return path


def save_maps(probe: Probe, state: ServerState, index: int, folder: Path) -> list[Path]:
    """Writes the maps of one sample.

    Entropies are shown as shares of the largest possible one, from dark blue (0) to yellow (1).
    """
    scores, features, target = probe.maps(state, index)
    size = (target.shape[-2], target.shape[-1])
    stem = folder / f"{index:06d}"

    def file(kind: str) -> Path:
        return stem.with_name(f"{stem.name}-{kind}.png")

    feature_map = upsampled(feature_entropy(features), size)
    return [
        save_picture(picture_of(probe.federation.samples, index), file("picture")),
        save_labels(_bytes(target[0]), file("truth")),
        save_labels(_bytes(scores.argmax(dim=1)[0]), file("prediction")),
        save_heat(relative(softmax_entropy(scores)[0], scores.shape[1]), file("softmax-entropy")),
        save_heat(relative(feature_map[0], features.shape[1]), file("feature-entropy")),
    ]


def picture_of(samples: Samples, index: int) -> NDArray[np.uint8]:
    """A sample's input as a picture ``[H, W, channels]``; stretched where it is no picture."""
    where = np.array([index])
    raw = samples.raw(where) if isinstance(samples, MappedSamples) else samples.batch(where)
    values = raw[0][0].double().movedim(0, -1).cpu().numpy()
    low, high = float(values.min()), float(values.max())
    if low < 0 or high > 1:
        values = (values - low) / max(high - low, 1e-12)
    return np.asarray(np.rint(255 * values), dtype=np.uint8)


def _bytes(labels: Tensor) -> NDArray[np.uint8]:
    return labels.cpu().numpy().astype(np.uint8)
