"""FPascal and FPascal-Macro: VOC2012 images with exactly one object class, for segmentation."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from fedproto.data.base import DATASETS, Download, OnProgress
from fedproto.data.federation import Federation
from fedproto.data.files import FileTree
from fedproto.data.images import IMAGENET_MEAN, IMAGENET_STD
from fedproto.data.masks import Pair, count_labels, label_lookup, put_pairs
from fedproto.data.prepared import Arrays, Builder, prepared
from fedproto.data.samples import MappedSamples
from fedproto.data.sharing import Partition, SharedOut
from fedproto.errors import DataError
from fedproto.options import option

CLASSES = (
    "background",
    "aeroplane",
    "bicycle",
    "bird",
    "boat",
    "bottle",
    "bus",
    "car",
    "cat",
    "chair",
    "cow",
    "diningtable",
    "dog",
    "horse",
    "motorbike",
    "person",
    "pottedplant",
    "sheep",
    "sofa",
    "train",
    "tvmonitor",
)
MACRO_CLASSES = {
    "background": "background",
    "person": "person",
    "vehicles": "aeroplane bicycle boat bus car motorbike train",
    "household": "bottle chair diningtable pottedplant sofa tvmonitor",
    "animals": "bird cat cow dog horse sheep",
}


@dataclass(frozen=True)
class Pascal(SharedOut):
    """What FPascal and FPascal-Macro share: the images, and sizes by a power law.

    The images of the list ``trainaug`` go to the clients, those of the official ``val`` are the
    server's validation set. Where there is no list ``trainaug`` it is all masks of
    ``SegmentationClassAug`` that are not in ``val``, which is how that list came about.
    """

    folder = "VOC"
    licence = "images: Flickr's terms; research only"
    downloads = (
        Download(
            "http://host.robots.ox.ac.uk/pascal/VOC/voc2012/VOCtrainval_11-May-2012.tar",
            "VOC/VOCtrainval_11-May-2012.tar",
            "6cd6e144f989b92b3379bac3b3de84fd",
        ),
        # Made from the Semantic Boundaries Dataset by others; nobody publishes a checksum of it.
        Download(
            "https://www.dropbox.com/s/oeu149j8qtbs1x0/SegmentationClassAug.zip?dl=1",
            "VOC/SegmentationClassAug.zip",
        ),
    )

    seed: int = option(65, "seed of partition and splits", at_least=0)
    clients: int = 100
    partition: Partition = "dirichlet"
    size: int = option(224, "width and height of the images", at_least=8, at_most=4096)
    mean: tuple[float, ...] = option(IMAGENET_MEAN, "subtracted from pixels between 0 and 1")
    std: tuple[float, ...] = option(IMAGENET_STD, "pixels are divided by this")

    def load(self, root: Path) -> Federation:
        """Decodes images and masks if that was not done before, and shares them out."""
        arrays = self.arrays(root)
        relabel, class_names = self._relabel()
        objects = relabel[arrays["classes"]] - 1
        for_clients = np.flatnonzero(arrays["for_clients"])
        parts = [for_clients[part] for part in self.share(objects[for_clients])]
        return self.federation(
            DATASETS.name_of(type(self)),
            MappedSamples(
                torch.from_numpy(arrays["images"]),
                torch.from_numpy(arrays["masks"]),
                relabel=torch.from_numpy(relabel),
            ),
            parts,
            num_classes=len(class_names),
            input_shape=(3, self.size, self.size),
            task="segmentation",
            validation=np.flatnonzero(~arrays["for_clients"]),
            labels=objects,
            class_names=class_names,
        )

    def _relabel(self) -> tuple[NDArray[np.int64], tuple[str, ...]]:
        """The label of each class of VOC2012 here, and what the classes are called."""
        return label_lookup({label: [label] for label in range(len(CLASSES))}), CLASSES

    def arrays(self, root: Path, on_progress: OnProgress | None = None) -> Arrays:
        """Decodes images and masks."""
        tree = self.tree(root)

        def build(builder: Builder) -> None:
            lists = _lists(tree)
            stems = [stem for names in lists.values() for stem in names]
            masks = [tree.require(f"SegmentationClassAug/{stem}.png") for stem in stems]
            seen = count_labels(tree, masks, len(CLASSES), on_progress) > 0
            single = np.flatnonzero(seen[:, 1:].sum(axis=1) == 1)
            pairs = [
                Pair(tree.require(f"JPEGImages/{stems[row]}.jpg"), masks[row]) for row in single
            ]
            put_pairs(builder, tree, pairs, self.size, len(CLASSES), on_progress)
            builder.put("classes", 1 + seen[single, 1:].argmax(axis=1))
            builder.put("for_clients", single < len(lists["trainaug"]))
            builder.put("stems", np.array([stems[row] for row in single], dtype=np.bytes_))

        return prepared("voc2012", tree.sources, {"size": self.size}, build)


@DATASETS.register("fpascal")
@dataclass(frozen=True)
class FPascal(Pascal):
    """VOC2012 in its 20 object classes and background, mixed by a Dirichlet distribution.

    The default seed gives client sizes with standard deviation 25.7 on the 6,746 images of
    ``trainaug`` with one object class; the paper's Table 1 has 6,665 and 25.7.
    """


@DATASETS.register("fpascal-macro")
@dataclass(frozen=True)
class FPascalMacro(Pascal):
    """VOC2012 in four groups of classes (person, vehicles, household, animals) and background."""

    def _relabel(self) -> tuple[NDArray[np.int64], tuple[str, ...]]:
        groups = [
            [CLASSES.index(name) for name in names.split()] for names in MACRO_CLASSES.values()
        ]
        return label_lookup(dict(enumerate(groups))), tuple(MACRO_CLASSES)


def _lists(tree: FileTree) -> dict[str, list[str]]:
    """The names of the images for clients and for validation."""
    lists = {}
    for name in ("trainaug", "val"):
        file = tree.find(f"ImageSets/Segmentation/{name}.txt")
        if file is not None:
            lists[name] = tree.read(file).decode("utf-8", "replace").split()
    validation = lists.setdefault("val", [])
    if "trainaug" not in lists:
        masks = (Path(name) for name in tree.locations if name.endswith(".png"))
        found = {mask.stem for mask in masks if mask.parent.name == "SegmentationClassAug"}
        lists["trainaug"] = sorted(found.difference(validation))
    if not lists["trainaug"]:
        raise DataError(
            f"{tree.folder} has neither ImageSets/Segmentation/trainaug.txt nor masks in"
            " SegmentationClassAug"
        )
    return {"trainaug": lists["trainaug"], "val": validation}
