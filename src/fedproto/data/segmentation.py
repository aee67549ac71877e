"""Data sets for segmentation: VOC2012 and a user's own folders of pictures and label maps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import ClassVar, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from fedproto.callback import Callback
from fedproto.data.base import DATASETS, Builder, Download, Prepared
from fedproto.data.federation import Federation
from fedproto.data.files import FileTree, open_tree
from fedproto.data.images import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    for_each_file,
    is_picture,
    open_image,
    pixels,
)
from fedproto.data.own import own_path
from fedproto.data.samples import MappedSamples
from fedproto.data.sharing import Partition, SharedOut
from fedproto.errors import DataError
from fedproto.options import option
from fedproto.types import VOID

_VOC = """
background aeroplane bicycle bird boat bottle bus car cat chair cow diningtable dog horse motorbike
person pottedplant sheep sofa train tvmonitor
"""
CLASSES = tuple(_VOC.split())
MACRO_CLASSES = {
    "background": "background",
    "person": "person",
    "vehicles": "aeroplane bicycle boat bus car motorbike train",
    "household": "bottle chair diningtable pottedplant sofa tvmonitor",
    "animals": "bird cat cow dog horse sheep",
}

Pair: TypeAlias = tuple[str, str]
"""The files of a picture and of its label map, by name in a tree."""


def read_mask(content: bytes, where: object, num_classes: int) -> NDArray[np.uint8]:
    """A label map ``[H, W]``: a grey or palette picture whose values are the classes."""
    picture = open_image(content, where, scale=False)
    if picture.mode not in ("L", "P", "1"):
        raise DataError(
            f"{where} is not a label map: its mode is {picture.mode}, not grey or palette"
        )
    mask = np.asarray(picture, dtype=np.uint8)
    if np.any(wrong := (mask >= num_classes) & (mask != VOID)):
        raise DataError(
            f"{where}: label {mask[wrong][0]} is outside the classes 0 to {num_classes - 1}"
            f" and void {VOID}"
        )
    return mask


def count_labels(
    tree: FileTree, masks: Sequence[str], num_classes: int, callback: Callback | None = None
) -> NDArray[np.int64]:
    """Pixels of each class in each mask, ``[N, classes]``."""
    counts = np.zeros((len(masks), num_classes), dtype=np.int64)

    def count(index: int, where: object, content: bytes) -> None:
        mask = read_mask(content, where, num_classes)
        counts[index] = np.bincount(mask.ravel(), minlength=VOID + 1)[:num_classes]

    for_each_file(tree, masks, count, callback)
    return counts


def put_pairs(
    builder: Builder,
    tree: FileTree,
    pairs: Sequence[Pair],
    size: int,
    num_classes: int,
    callback: Callback | None = None,
) -> None:
    """Writes the arrays ``images`` and ``masks``.

    The longer side is resized to `size`, the rest is padded at the right and below: pictures
    with ImageNet's mean colour, masks with void, so that nothing is cut away or distorted.
    """
    from PIL import Image

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
        wanted = fitted(mask.shape[::-1], size)
        small = np.asarray(Image.fromarray(mask).resize(wanted, Image.Resampling.NEAREST))
        masks[index] = VOID
        masks[index, : small.shape[0], : small.shape[1]] = small

    for_each_file(tree, [image for image, _ in pairs], put_image, callback)
    for_each_file(tree, [mask for _, mask in pairs], put_mask, callback)
    for (image, mask), image_size, mask_size in zip(pairs, *original.tolist(), strict=True):
        if image_size != mask_size:
            raise DataError(
                f"{tree.locations[mask]} is {mask_size[0]}×{mask_size[1]} pixels but its image"
                f" {image} is {image_size[0]}×{image_size[1]}"
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


@DATASETS.register("segmentation")
@dataclass(frozen=True)
class SegmentationFolder(Prepared, SharedOut):
    """Your own pictures and label maps: 0 is background, 255 is void.

    For the partition a picture counts as the object class that covers most of it.
    """

    prepared_by = ("size", "num_classes")

    path: str = option("", "folder that contains both folders")
    images: str = option("images", "name of the folder of images")
    masks: str = option("masks", "name of the folder of label maps")
    num_classes: int = option(
        21, "number of classes, including the background", at_least=2, at_most=255
    )
    size: int = option(
        224, "width and height to which images are resized, in pixels", at_least=8, at_most=4096
    )
    mean: tuple[float, ...] = IMAGENET_MEAN
    std: tuple[float, ...] = IMAGENET_STD

    def load(self, root: Path) -> Federation:
        """Decodes pictures and masks if that was not done before, and shares them out."""
        arrays = self.prepare(root)
        objects = np.array(arrays["objects"])
        return self.federation(
            Path(self.path).stem,
            MappedSamples(torch.from_numpy(arrays["images"]), torch.from_numpy(arrays["masks"])),
            self.share(objects),
            num_classes=self.num_classes,
            task="segmentation",
            labels=objects,
        )

    def tree(self, root: Path) -> FileTree:
        """The pictures and masks alone."""
        tree = open_tree(own_path(self.path, root))
        used = sorted(name for pair in self._pairs(tree) for name in pair)
        return FileTree(tree.folder, {name: tree.sources[name] for name in used})

    def build(self, tree: FileTree, builder: Builder, callback: Callback | None) -> None:
        """Decodes pictures and masks."""
        pairs = self._pairs(tree)
        counts = count_labels(tree, [mask for _, mask in pairs], self.num_classes, callback)
        put_pairs(builder, tree, pairs, self.size, self.num_classes, callback)
        builder.put("objects", counts[:, 1:].argmax(axis=1))

    def _pairs(self, tree: FileTree) -> list[Pair]:
        """Pictures and masks of the same name up to the ending."""
        folder = tree.folder
        images, masks = (_by_stem(tree, name) for name in (self.images, self.masks))
        for stem in sorted(images.keys() ^ masks.keys()):
            here, there = (images, self.masks) if stem in images else (masks, self.images)
            raise DataError(
                f"{folder / here[stem]} has no counterpart {stem}.* in {folder / there}"
            )
        if not images:
            raise DataError(f"{folder / self.images} contains no images")
        return [(images[stem], masks[stem]) for stem in sorted(images)]


def _by_stem(tree: FileTree, folder: str) -> dict[str, str]:
    """The pictures of a folder by their names without the ending."""
    found: dict[str, str] = {}
    for name in tree.sources:
        if name.startswith(f"{folder}/") and is_picture(name):
            stem = PurePosixPath(name).relative_to(folder).with_suffix("").as_posix()
            if stem in found:
                raise DataError(f"{tree.folder}: {name} and {found[stem]} have the same name")
            found[stem] = name
    return found


@DATASETS.register("fpascal")
@dataclass(frozen=True)
class FPascal(Prepared, SharedOut):
    """VOC2012 images with exactly one of its 20 object classes, mixed by a Dirichlet distribution.

    The images of the list ``trainaug`` go to the clients, those of the official ``val`` are the
    server's validation set. Where there is no list ``trainaug`` it is all masks of
    ``SegmentationClassAug`` that are not in ``val``, which is how that list came about.

    The default seed gives client sizes with standard deviation 26.2 on the 6,746 images of
    ``trainaug`` with one object class; the paper's Table 1 has 6,665 and 25.7.

    Attributes:
        groups: The classes by name, each with those of VOC2012 that belong to it.
    """

    folder = "VOC"
    licence = "images: Flickr's terms; research only"
    downloads = (
        Download(
            "http://host.robots.ox.ac.uk/pascal/VOC/voc2012/VOCtrainval_11-May-2012.tar",
            "VOC/VOCtrainval_11-May-2012.tar",
            "6cd6e144f989b92b3379bac3b3de84fd",
        ),
        # Made from the Semantic Boundaries Dataset by others; no checksum of it is published.
        Download(
            "https://www.dropbox.com/s/oeu149j8qtbs1x0/SegmentationClassAug.zip?dl=1",
            "VOC/SegmentationClassAug.zip",
        ),
    )

    prepared_as, prepared_by = "voc2012", ("size",)
    groups: ClassVar[Mapping[str, str]] = {name: name for name in CLASSES}

    seed: int = option(4, "seed of partition and splits", at_least=0)
    clients: int = 100
    partition: Partition = "dirichlet"
    size: int = option(224, "width and height of the images, in pixels", at_least=8, at_most=4096)
    mean: tuple[float, ...] = IMAGENET_MEAN
    std: tuple[float, ...] = IMAGENET_STD

    def load(self, root: Path) -> Federation:
        """Decodes images and masks if that was not done before, and shares them out."""
        arrays = self.prepare(root)
        relabel = np.full(VOID + 1, VOID, dtype=np.int64)
        for new, members in enumerate(self.groups.values()):
            relabel[[CLASSES.index(name) for name in members.split()]] = new
        objects = relabel[arrays["classes"]] - 1
        for_clients = np.flatnonzero(arrays["for_clients"])
        return self.federation(
            DATASETS.name_of(type(self)),
            MappedSamples(
                torch.from_numpy(arrays["images"]),
                torch.from_numpy(arrays["masks"]),
                relabel=torch.from_numpy(relabel),
            ),
            [for_clients[part] for part in self.share(objects[for_clients])],
            num_classes=len(self.groups),
            task="segmentation",
            validation=np.flatnonzero(~arrays["for_clients"]),
            labels=objects,
            class_names=tuple(self.groups),
        )

    def build(self, tree: FileTree, builder: Builder, callback: Callback | None) -> None:
        """Decodes images and masks."""
        train, validation = _lists(tree)
        stems = [*train, *validation]
        masks = [tree.require(f"SegmentationClassAug/{stem}.png") for stem in stems]
        seen = count_labels(tree, masks, len(CLASSES), callback) > 0
        single = np.flatnonzero(seen[:, 1:].sum(axis=1) == 1)
        pairs = [(tree.require(f"JPEGImages/{stems[row]}.jpg"), masks[row]) for row in single]
        put_pairs(builder, tree, pairs, self.size, len(CLASSES), callback)
        builder.put("classes", 1 + seen[single, 1:].argmax(axis=1))
        builder.put("for_clients", single < len(train))


@DATASETS.register("fpascal-macro")
@dataclass(frozen=True)
class FPascalMacro(FPascal):
    """VOC2012 in four groups of classes (person, vehicles, household, animals) and background."""

    groups = MACRO_CLASSES


def _lists(tree: FileTree) -> tuple[list[str], list[str]]:
    """The names of the images for clients and for validation."""
    train, validation = (
        tree.read(file).decode("utf-8", "replace").split() if file else []
        for file in (tree.find(f"ImageSets/Segmentation/{n}.txt") for n in ("trainaug", "val"))
    )
    if not train:
        masks = (Path(name) for name in tree.locations if name.endswith(".png"))
        found = {mask.stem for mask in masks if mask.parent.name == "SegmentationClassAug"}
        train = sorted(found.difference(validation))
    if not train:
        raise DataError(
            f"{tree.folder} has neither ImageSets/Segmentation/trainaug.txt nor masks in"
            " SegmentationClassAug"
        )
    return train, validation
