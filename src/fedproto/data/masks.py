"""Pictures with label maps: brought to one size together, checked against each other."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedproto.data.base import OnProgress
from fedproto.data.files import FileTree
from fedproto.data.images import IMAGENET_MEAN, for_each_file, open_image, pixels
from fedproto.data.prepared import Builder
from fedproto.errors import DataError
from fedproto.types import VOID

__all__ = [
    "VOID",
    "Pair",
    "count_labels",
    "fitted",
    "label_lookup",
    "palette",
    "put_pairs",
    "read_mask",
]


@dataclass(frozen=True)
class Pair:
    """The files of a picture and its mask, by name in a tree."""

    image: str
    mask: str


def read_mask(content: bytes, where: object, num_classes: int) -> NDArray[np.uint8]:
    """A label map ``[H, W]``: a grey or palette picture whose values are the classes."""
    picture = open_image(content, where, scale=False)
    if picture.mode not in ("L", "P", "1"):
        raise DataError(f"{where} is no label map: its mode is {picture.mode}, not grey or palette")
    mask = np.asarray(picture, dtype=np.uint8)
    if np.any(wrong := (mask >= num_classes) & (mask != VOID)):
        raise DataError(
            f"{where}: label {mask[wrong][0]} is outside the classes 0 to {num_classes - 1}"
            f" and void {VOID}"
        )
    return mask


def count_labels(
    tree: FileTree, masks: Sequence[str], num_classes: int, on_progress: OnProgress | None = None
) -> NDArray[np.int64]:
    """How many pixels of each class each mask has, ``[N, classes]``."""
    counts = np.zeros((len(masks), num_classes), dtype=np.int64)

    def count(index: int, where: object, content: bytes) -> None:
        mask = read_mask(content, where, num_classes)
        counts[index] = np.bincount(mask.ravel(), minlength=VOID + 1)[:num_classes]

    work = {name: partial(count, index, tree.locations[name]) for index, name in enumerate(masks)}
    for_each_file(tree, work, on_progress)
    return counts


def put_pairs(
    builder: Builder,
    tree: FileTree,
    pairs: Sequence[Pair],
    size: int,
    num_classes: int,
    on_progress: OnProgress | None = None,
) -> None:
    """Writes the arrays ``images`` and ``masks``.

    The longer side is brought to `size`, the rest is filled up at the right and below: pictures
    with ImageNet's mean colour, masks with void, so that nothing is cut away or distorted.
    """
    images = builder.array("images", (len(pairs), 3, size, size), np.uint8)
    masks = builder.array("masks", (len(pairs), size, size), np.uint8)
    original = np.zeros((2, len(pairs), 2), dtype=np.int64)

    def put_image(index: int, where: object, content: bytes) -> None:
        picture = open_image(content, where)
        original[0, index] = picture.size
        small = pixels(picture, 3, fitted(picture.size, size))
        images[index] = np.rint(255 * np.array(IMAGENET_MEAN))[:, None, None]
        images[index, :, : small.shape[1], : small.shape[2]] = small

    def put_mask(index: int, where: object, content: bytes) -> None:
        mask = read_mask(content, where, num_classes)
        original[1, index] = mask.shape[::-1]
        small = _nearest(mask, fitted(mask.shape[::-1], size))
        masks[index] = VOID
        masks[index, : small.shape[0], : small.shape[1]] = small

    work: dict[str, Callable[[bytes], None]] = {}
    for index, pair in enumerate(pairs):
        work[pair.image] = partial(put_image, index, tree.locations[pair.image])
        work[pair.mask] = partial(put_mask, index, tree.locations[pair.mask])
    for_each_file(tree, work, on_progress)
    for pair, image_size, mask_size in zip(pairs, *original.tolist(), strict=True):
        if image_size != mask_size:
            raise DataError(
                f"{tree.locations[pair.mask]} is {mask_size[0]}×{mask_size[1]} pixels but its"
                f" picture {pair.image} is {image_size[0]}×{image_size[1]}"
            )


def fitted(size: tuple[int, ...], longest: int) -> tuple[int, int]:
    """Width and height when the longer side becomes `longest`."""
    width, height = size
    scale = longest / max(width, height)
    return max(1, round(width * scale)), max(1, round(height * scale))


def palette() -> NDArray[np.uint8]:
    """The colours of PASCAL VOC's label maps, ``[256, 3]``.

    The bits of a label are spread over the colours: three at a time, from the highest bit down.
    """
    labels = np.arange(256)
    colours = np.zeros((256, 3), dtype=np.uint8)
    for step in range(8):
        for channel in range(3):
            bit = (labels >> (3 * step + channel)) & 1
            colours[:, channel] |= (bit << (7 - step)).astype(np.uint8)
    return colours


def label_lookup(groups: Mapping[int, Sequence[int]]) -> NDArray[np.int64]:
    """The new label for each old one, ``[256]``; void stays void, and so does what is not named."""
    lookup = np.full(VOID + 1, VOID, dtype=np.int64)
    for new, old in groups.items():
        lookup[list(old)] = new
    return lookup


def _nearest(mask: NDArray[np.uint8], size: tuple[int, int]) -> NDArray[np.uint8]:
    from PIL import Image

    if mask.shape[::-1] == size:
        return mask
    resized: Any = Image.fromarray(mask).resize(size, Image.Resampling.NEAREST)
    return np.asarray(resized, dtype=np.uint8)
