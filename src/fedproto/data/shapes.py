"""Shapes: textured figures on textured ground, generated from the seed, for segmentation.

Every image shows one figure, as FPascal's images show one object. Edges of figures are void, as in
PASCAL VOC.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from fedproto.data.base import DATASETS
from fedproto.data.federation import Federation
from fedproto.data.samples import TensorSamples
from fedproto.data.sharing import SharedOut
from fedproto.options import option
from fedproto.rng import Purpose, stream
from fedproto.types import VOID

Plane: TypeAlias = NDArray[np.float64]

# Each gives how far inside of a figure of radius 1 a point is, negative outside.
_FIGURES = {
    "disc": lambda x, y: 1 - np.hypot(x, y),
    "square": lambda x, y: 0.85 - np.maximum(abs(x), abs(y)),
    "triangle": lambda x, y: np.minimum(0.6 - y, (1 + y - 1.7 * abs(x)) / 2),
    "ring": lambda x, y: 0.3 - abs(np.hypot(x, y) - 0.7),
    "cross": lambda x, y: np.maximum(
        np.minimum(0.35 - abs(x), 1 - abs(y)), np.minimum(0.35 - abs(y), 1 - abs(x))
    ),
}
_EDGE = 0.5
"""Half the width of the void around a figure, in pixels."""


@DATASETS.register("shapes")
@dataclass(frozen=True)
class Shapes(SharedOut):
    """Textured figures to segment, generated from the seed; nothing to download."""

    images: int = option(200, "number of images", at_least=1, at_most=1_000_000)
    size: int = option(48, "width and height of the images", at_least=16, at_most=4096)
    classes: int = option(3, "number of figures", at_least=1, at_most=len(_FIGURES))
    alpha: float = 1.0

    def load(self, root: Path) -> Federation:
        """Generates the images and shares them out."""
        rng = stream(self.seed, Purpose.SAMPLES)
        labels = rng.randint(self.classes, size=self.images).astype(np.int64)
        images = np.empty((self.images, 3, self.size, self.size), dtype=np.float32)
        masks = np.empty((self.images, self.size, self.size), dtype=np.int64)
        for index, label in enumerate(labels):
            images[index], masks[index] = self._draw(int(label), rng)
        return self.federation(
            "shapes",
            TensorSamples(torch.from_numpy(images), torch.from_numpy(masks)),
            self.share(labels),
            num_classes=self.classes + 1,
            task="segmentation",
            labels=labels,
            class_names=("background", *list(_FIGURES)[: self.classes]),
        )

    def _draw(self, label: int, rng: np.random.RandomState) -> tuple[Plane, NDArray[np.int64]]:
        """An image ``[3, size, size]`` between 0 and 1, and its label map."""
        radius = self.size * rng.uniform(0.22, 0.4)
        center = rng.uniform(0.8 * radius, self.size - 0.8 * radius, 2)
        turn = rng.uniform(-0.4, 0.4)
        y, x = (np.mgrid[: self.size, : self.size] - center[:, None, None]) / radius
        u, v = np.cos(turn) * x + np.sin(turn) * y, np.cos(turn) * y - np.sin(turn) * x
        inside = list(_FIGURES.values())[label](u, v) * radius
        hue = (label + rng.uniform(-0.2, 0.2)) / self.classes
        figure = _coloured(hue, self._texture(rng), rng)
        ground = _coloured(rng.uniform(), self._texture(rng), rng, saturation=0.15)
        image = np.where(inside > 0, figure, ground) + rng.normal(0, 0.03, figure.shape)
        mask = np.where(inside > 0, label + 1, 0)
        mask[abs(inside) < _EDGE] = VOID
        return image.clip(0, 1), mask

    def _texture(self, rng: np.random.RandomState) -> Plane:
        """Waves of a random direction and length, between 0 and 1."""
        y, x = np.mgrid[: self.size, : self.size]
        angle, length, phase = rng.uniform(0, np.pi), rng.uniform(4, 10), rng.uniform(0, 6)
        waves = np.sin(2 * np.pi * (np.cos(angle) * x + np.sin(angle) * y) / length + phase)
        return np.asarray((1 + waves) / 2)


def _coloured(
    hue: float, texture: Plane, rng: np.random.RandomState, saturation: float = 0.7
) -> Plane:
    """A texture in shades of a hue ``[3, size, size]``."""
    thirds = np.arange(3) / 3
    colour = 1 - saturation * (0.5 - 0.5 * np.cos(2 * np.pi * (hue - thirds)))
    brightness = rng.uniform(0.5, 0.75) + 0.25 * texture
    return np.asarray(colour[:, None, None] * brightness)
