"""Data sets in the idx format of MNIST and EMNIST: a magic number, the dimensions, the bytes."""

from __future__ import annotations

import abc
import math
import struct
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedproto.data.base import OnProgress
from fedproto.data.files import FileTree
from fedproto.data.official import PARTS, OfficialImages
from fedproto.data.prepared import Builder
from fedproto.errors import DataError

_UNSIGNED_BYTE = 0x08


def read_idx(tree: FileTree, name: str, dimensions: int) -> NDArray[np.uint8]:
    """Reads an idx file of bytes, compressed or not."""
    found = tree.find(name) or tree.require(f"{name}.gz")
    content, where = tree.read(found), tree.locations[found]
    start = 4 + 4 * dimensions
    if len(content) < start or content[:4] != bytes([0, 0, _UNSIGNED_BYTE, dimensions]):
        raise DataError(f"{where} is no idx file of {dimensions} dimensions; fetch it again")
    shape = struct.unpack(f">{dimensions}I", content[4:start])
    if len(content) != start + math.prod(shape):
        raise DataError(
            f"{where} is incomplete: {len(content) - start} bytes for {shape}; fetch it again"
        )
    if math.prod(shape) == 0:
        raise DataError(f"{where} is empty: its dimensions are {shape}; fetch it again")
    return np.frombuffer(content, dtype=np.uint8, offset=start).reshape(shape)


def read_images_and_labels(
    tree: FileTree, images: str, labels: str
) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """A pair of idx files: images ``[N, H, W]`` and their labels ``[N]``."""
    pixels, classes = read_idx(tree, images, 3), read_idx(tree, labels, 1)
    if len(pixels) != len(classes):
        raise DataError(
            f"{tree.folder}: {images} has {len(pixels)} images but {labels} {len(classes)} labels"
        )
    return pixels, classes.astype(np.int64)


@dataclass(frozen=True)
class IdxImages(OfficialImages):
    """Grey images of ten classes, 28×28 pixels, from idx files."""

    validation: float = 0.1

    @abc.abstractmethod
    def read(self, tree: FileTree, part: str) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
        """Upright images ``[N, H, W]`` and labels from 0, of the files ``train`` or ``test``."""

    def build(self, tree: FileTree, builder: Builder, on_progress: OnProgress | None) -> None:
        """Unpacks the images."""
        del on_progress
        parts = [self.read(tree, part) for part in PARTS]
        self.put_parts(
            builder, [(images[:, None], labels) for images, labels in parts], tree.folder
        )
