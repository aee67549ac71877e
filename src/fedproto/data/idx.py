"""Data sets in the idx format of MNIST and EMNIST: a magic number, the dimensions, the bytes."""

from __future__ import annotations

import abc
import math
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from fedproto.data.base import DATASETS, OnProgress
from fedproto.data.federation import Federation
from fedproto.data.files import FileTree
from fedproto.data.prepared import Arrays, Builder, prepared
from fedproto.data.samples import MappedSamples
from fedproto.data.sharing import SharedOut
from fedproto.errors import DataError

_UNSIGNED_BYTE = 0x08
CLASSES = 10


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
class IdxImages(SharedOut):
    """Grey images of ten classes, 28×28 pixels, from idx files."""

    validation: float = 0.1

    @abc.abstractmethod
    def read(self, tree: FileTree) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
        """Upright images ``[N, H, W]`` and labels from 0, of all official files."""

    def load(self, root: Path) -> Federation:
        """Reads the official files and shares the images out."""
        arrays = self.arrays(root)
        labels = np.array(arrays["labels"])
        images = torch.from_numpy(self.looks(arrays["images"]))
        return self.federation(
            DATASETS.name_of(type(self)),
            MappedSamples(images, torch.from_numpy(labels)),
            self.share(labels),
            num_classes=CLASSES,
            input_shape=(1, *arrays["images"].shape[2:]),
        )

    def looks(self, images: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """The images ``[N, 1, H, W]`` as they are to look; as they are stored by default."""
        return images

    def arrays(self, root: Path, on_progress: OnProgress | None = None) -> Arrays:
        """Unpacks the images."""
        del on_progress
        tree = self.tree(root)

        def build(builder: Builder) -> None:
            images, labels = self.read(tree)
            _check_labels(labels, tree.folder)
            builder.put("images", images[:, None])
            builder.put("labels", labels)

        return prepared(DATASETS.name_of(type(self)), tree.sources, {}, build)


def _check_labels(labels: NDArray[np.int64], folder: Path) -> None:
    found = np.unique(labels)
    if len(found) and found[-1] >= CLASSES:
        raise DataError(f"{folder}: label {found[-1]} is outside the classes 0 to {CLASSES - 1}")
    for label in range(CLASSES):
        if label not in found:
            raise DataError(f"{folder}: class {label} has no images; fetch the files again")
