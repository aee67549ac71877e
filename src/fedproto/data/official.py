"""Image data sets with official training and test files: from files to a federation."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from fedproto.callback import Callback
from fedproto.data.base import DATASETS
from fedproto.data.federation import Federation
from fedproto.data.files import FileTree
from fedproto.data.prepared import Arrays, Builder, prepared
from fedproto.data.samples import MappedSamples
from fedproto.data.sharing import Partition, SharedOut, TestSet
from fedproto.errors import DataError
from fedproto.options import option

PARTS = ("train", "test")
TEN = 10

Labelled: TypeAlias = tuple[NDArray[np.uint8], NDArray[np.int64]]
"""Images ``[N, C, H, W]`` and their labels ``[N]``."""


@dataclass(frozen=True)
class OfficialImages(SharedOut):
    """Images of one size in official training and test files.

    With ``test = "official"`` the training images are shared out among the clients and the test
    images are the test set; otherwise both are pooled, shared out, and split per client.

    Attributes:
        class_names: Names of the classes, in the order of their labels; digits and letters that
            need no names have none.
        prepared_by: Names of the options that the prepared arrays depend on.
    """

    class_names: ClassVar[tuple[str, ...]] = ()
    prepared_by: ClassVar[tuple[str, ...]] = ()

    def read(self, tree: FileTree, part: str) -> Labelled:
        """The images and labels of the files ``train`` or ``test``."""
        raise NotImplementedError

    def build(self, tree: FileTree, builder: Builder, callback: Callback | None) -> None:
        """Writes the arrays of all official images.

        They are ``images [N, C, H, W]``, ``labels [N]`` and ``test [N]`` (whether an image belongs
        to the official test set), and where there are any ``groups [N]``, the natural groups, and
        ``names``, those of the classes.
        """
        parts = [self.read(tree, part) for part in PARTS]
        images, labels = (np.concatenate(each) for each in zip(*parts, strict=True))
        test = np.arange(len(labels)) >= len(parts[0][1])
        put_labels(builder, labels, test, tree.folder, len(self.class_names) or TEN)
        builder.put("images", images)

    def load(self, root: Path) -> Federation:
        """Reads the official files and shares the images out."""
        arrays = self.prepare(root)
        labels, found = np.array(arrays["labels"]), self.test_part(arrays)
        test, test_set = (np.zeros(len(labels), dtype=bool), "split") if found is None else found
        shared = np.flatnonzero(~test)
        groups = np.array(arrays["groups"])[shared] if "groups" in arrays else None
        names = tuple(name.decode() for name in arrays.get("names", ())) or self.class_names
        images = torch.from_numpy(self.preprocess(arrays["images"]))
        return self.federation(
            DATASETS.name_of(type(self)),
            MappedSamples(images, torch.from_numpy(labels)),
            [shared[part] for part in self.share(labels[shared], groups)],
            num_classes=len(names) or TEN,
            input_shape=tuple(images.shape[1:]),
            class_names=names,
            official=None if found is None else np.flatnonzero(test),
            test_set=test_set,
        )

    def test_part(self, arrays: Arrays) -> tuple[NDArray[np.bool_], str] | None:
        """Which images are the test set ``[N]`` and its name; None where every client's is split.

        The name is the one that records have.
        """
        return (np.array(arrays["test"]), "official") if self.test == "official" else None

    def preprocess(self, images: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """The images ``[N, C, H, W]`` as models see them; as they are stored by default."""
        return images

    def prepare(self, root: Path, callback: Callback | None = None) -> Arrays:
        """Decodes the images."""
        tree = self.tree(root)
        options = {"parts": PARTS, **{name: getattr(self, name) for name in self.prepared_by}}

        def build(builder: Builder) -> None:
            self.build(tree, builder, callback)

        return prepared(DATASETS.name_of(type(self)), tree.sources, options, build)


def put_labels(
    builder: Builder,
    labels: NDArray[np.int64],
    test: NDArray[np.bool_],
    folder: Path,
    num_classes: int,
) -> None:
    """Writes labels, once they are within the classes and no class is missing."""
    found = np.unique(labels)
    for label in found:
        if not 0 <= label < num_classes:
            raise DataError(
                f"{folder}: label {label} is outside the classes 0 to {num_classes - 1}"
            )
    for label in range(num_classes):
        if label not in found:
            raise DataError(f"{folder}: class {label} has no images; fetch the files again")
    builder.put("labels", labels)
    builder.put("test", test)


@dataclass(frozen=True)
class Benchmark(OfficialImages):
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
        test = int(arrays["test"].sum())
        found = (len(arrays["test"]) - test, test)
        for part, number, wanted in zip(PARTS, found, self.counts, strict=True):
            if number != wanted and not (self.allow_missing and 0 < number < wanted):
                raise DataError(
                    f"{root / self.folder} has {number:,} instead of {wanted:,} {part} images;"
                    " fetch the files again, or accept fewer: data.allow_missing=true"
                )
        return arrays
