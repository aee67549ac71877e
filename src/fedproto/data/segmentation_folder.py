"""A user's own pictures and label maps in two folders, with the same names up to the ending."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import numpy as np
import torch

from fedproto.data.base import DATASETS, OnProgress
from fedproto.data.federation import Federation
from fedproto.data.files import FileTree, open_tree
from fedproto.data.images import IMAGENET_MEAN, IMAGENET_STD
from fedproto.data.masks import Pair, count_labels, put_pairs
from fedproto.data.own import is_picture, own_path
from fedproto.data.prepared import Arrays, Builder, prepared
from fedproto.data.samples import MappedSamples
from fedproto.data.sharing import SharedOut
from fedproto.errors import DataError
from fedproto.options import option


@DATASETS.register("segmentation")
@dataclass(frozen=True)
class SegmentationFolder(SharedOut):
    """Your own pictures and label maps: 0 is background, 255 is void.

    For the partition a picture counts as the object class that covers most of it.
    """

    path: str = option("", "the folder that holds both folders")
    images: str = option("images", "name of the folder of pictures")
    masks: str = option("masks", "name of the folder of label maps")
    num_classes: int = option(21, "number of classes with the background", at_least=2, at_most=255)
    size: int = option(
        224, "width and height that all pictures are brought to", at_least=8, at_most=4096
    )
    mean: tuple[float, ...] = option(IMAGENET_MEAN, "subtracted from pixels between 0 and 1")
    std: tuple[float, ...] = option(IMAGENET_STD, "pixels are divided by this")

    def load(self, root: Path) -> Federation:
        """Decodes pictures and masks if that was not done before, and shares them out."""
        arrays = self.arrays(root)
        objects = np.array(arrays["objects"])
        return self.federation(
            Path(self.path).stem,
            MappedSamples(torch.from_numpy(arrays["images"]), torch.from_numpy(arrays["masks"])),
            self.share(objects),
            num_classes=self.num_classes,
            input_shape=(3, self.size, self.size),
            task="segmentation",
            labels=objects,
        )

    def arrays(self, root: Path, on_progress: OnProgress | None = None) -> Arrays:
        """Decodes pictures and masks."""
        tree, pairs = self._pairs(own_path(self.path, root))
        options = {"size": self.size, "num_classes": self.num_classes}

        def build(builder: Builder) -> None:
            counts = count_labels(
                tree, [pair.mask for pair in pairs], self.num_classes, on_progress
            )
            put_pairs(builder, tree, pairs, self.size, self.num_classes, on_progress)
            builder.put("objects", counts[:, 1:].argmax(axis=1))

        return prepared("segmentation", tree.sources, options, build)

    def _pairs(self, folder: Path) -> tuple[FileTree, list[Pair]]:
        tree = open_tree(folder)
        images, masks = (_by_stem(tree, name) for name in (self.images, self.masks))
        for stem in sorted(images.keys() ^ masks.keys()):
            here, there = (images, self.masks) if stem in images else (masks, self.images)
            raise DataError(f"{folder / here[stem]} has no partner {stem}.* in {folder / there}")
        if not images:
            raise DataError(f"{folder / self.images} holds no pictures")
        pairs = [Pair(images[stem], masks[stem]) for stem in sorted(images)]
        used = {name for pair in pairs for name in (pair.image, pair.mask)}
        return FileTree(folder, {name: tree.sources[name] for name in sorted(used)}), pairs


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
