"""Images of one size with a class each: from arrays in the cache to a federation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from fedproto.callback import Callback
from fedproto.data.base import DATASETS, Arrays, Builder, Prepared
from fedproto.data.federation import Federation
from fedproto.data.files import FileTree
from fedproto.data.images import put_images
from fedproto.data.samples import MappedSamples
from fedproto.data.sharing import Partition, SharedOut, TestSet
from fedproto.errors import DataError, unknown_name
from fedproto.options import option
from fedproto.rng import Indices

PARTS = ("train", "test")
TEN = 10

Labelled: TypeAlias = tuple[NDArray[np.uint8], NDArray[np.int64]]
"""Images ``[N, C, H, W]`` and their labels ``[N]``."""


class Picture(NamedTuple):
    """A file, its class by name, whether it is of the official test set, and its natural group."""

    file: str
    label: str
    test: bool = False
    group: str = ""


@dataclass(frozen=True)
class Images(Prepared, SharedOut):
    """Images of one size with a class each.

    With ``test = "official"`` the training images are divided among the clients and the test
    images are the test set; otherwise both are pooled, divided, and split per client.

    The prepared arrays are ``images [N, C, H, W]`` and ``labels [N]``, and where there are any
    ``test [N]`` (whether an image belongs to the official test set), ``groups [N]``, the natural
    groups, and ``names``, those of the classes.

    Attributes:
        class_names: Names of the classes, in the order of their labels; digits and letters that
            need no names have none.
    """

    class_names: ClassVar[tuple[str, ...]] = ()

    def load(self, root: Path) -> Federation:
        """Decodes the images if that was not done before, and shares them out."""
        arrays = self.prepare(root)
        labels, found = np.array(arrays["labels"]), self.test_part(arrays)
        test, test_set = (np.zeros(len(labels), dtype=bool), "split") if found is None else found
        shared = np.flatnonzero(~test)
        groups = np.array(arrays["groups"])[shared] if "groups" in arrays else None
        names = tuple(name.decode() for name in arrays.get("names", ())) or self.class_names
        images = torch.from_numpy(self.preprocess(arrays["images"]))
        return self.federation(
            self.title(),
            MappedSamples(images, torch.from_numpy(labels)),
            [shared[part] for part in self.share(labels[shared], groups)],
            num_classes=len(names) or TEN,
            class_names=names,
            official=None if found is None else np.flatnonzero(test),
            test_set=test_set,
        )

    def title(self) -> str:
        """What the federation is called."""
        return DATASETS.name_of(type(self))

    def test_part(self, arrays: Arrays) -> tuple[NDArray[np.bool_], str] | None:
        """Which images are the test set ``[N]`` and its name; None where every client's is split.

        The name is the one that records have.
        """
        if self.test != "official" or "test" not in arrays:
            return None
        return np.array(arrays["test"]), "official"

    def preprocess(self, images: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """The images ``[N, C, H, W]`` as models see them; as they are stored by default."""
        return images

    def read(self, tree: FileTree, part: str) -> Labelled:
        """The images and labels of the official files ``train`` or ``test``."""
        raise NotImplementedError

    def build(self, tree: FileTree, builder: Builder, callback: Callback | None) -> None:
        """Writes the training images and then those of the test."""
        parts = [self.read(tree, part) for part in PARTS]
        images, labels = (np.concatenate(each) for each in zip(*parts, strict=True))
        check_labels(labels, len(self.class_names) or TEN, tree.folder)
        builder.put("images", images)
        builder.put("labels", labels)
        builder.put("test", np.arange(len(labels)) >= len(parts[0][1]))


def check_labels(labels: Indices, num_classes: int, folder: Path) -> None:
    """Checks that labels are within the classes and that no class is missing."""
    found = np.unique(labels)
    if len(wrong := found[(found < 0) | (found >= num_classes)]):
        raise DataError(f"{folder}: label {wrong[0]} is outside the classes 0 to {num_classes - 1}")
    if len(missing := np.setdiff1d(np.arange(num_classes), found)):
        raise DataError(f"{folder}: class {missing[0]} has no images; fetch the files again")


def put_pictures(
    builder: Builder,
    tree: FileTree,
    pictures: Sequence[Picture],
    classes: Sequence[str],
    form: tuple[int, int],
    callback: Callback | None = None,
) -> Indices:
    """Decodes pictures to a number of channels and a size, and writes their arrays.

    Returns:
        Their labels.
    """
    label_of = {name: label for label, name in enumerate(classes)}
    for file, label, *_ in pictures:
        if label not in label_of:
            raise DataError(f"{tree.locations[file]}: {unknown_name('class', label, classes)}")
    labels = np.array([label_of[picture.label] for picture in pictures], dtype=np.int64)
    builder.put("labels", labels)
    if any(picture.test for picture in pictures):
        builder.put("test", np.array([picture.test for picture in pictures]))
    if any(picture.group for picture in pictures):
        builder.put("groups", np.array([picture.group for picture in pictures]))
    put_images(builder, tree, [picture.file for picture in pictures], *form, callback)
    return labels


@dataclass(frozen=True)
class Benchmark(Images):
    """A data set that is tested on its official test set, and whose number of images is known.

    Attributes:
        counts: Official number of training and of test images.
    """

    counts: ClassVar[tuple[int, int]]

    clients: int = 100
    partition: Partition = "dirichlet-equal"
    test: TestSet = "official"
    allow_missing: bool = option(False, "accept fewer images than the official files have")

    def prepare(self, root: Path, callback: Callback | None = None) -> Arrays:
        """Decodes the images and counts them."""
        arrays = super().prepare(root, callback)
        test = int(np.sum(arrays.get("test", 0)))
        found = (len(arrays["labels"]) - test, test)
        for part, number, wanted in zip(PARTS, found, self.counts, strict=True):
            if number != wanted and not (self.allow_missing and 0 < number < wanted):
                raise DataError(
                    f"{root / self.folder} has {number:,} instead of {wanted:,} {part} images;"
                    " fetch the files again, or accept fewer: data.allow_missing=true"
                )
        return arrays
