"""Image data sets with official training and test files: one way from files to a federation."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

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


@dataclass(frozen=True)
class OfficialImages(SharedOut):
    """Images of one size in official training and test files.

    With ``test = "official"`` the training images are shared out among the clients and the test
    images are the test set; otherwise both are pooled, shared out, and split per client.

    Attributes:
        class_names: Names of the classes, in the order of their labels; digits and letters that
            need no names have none.
    """

    class_names: ClassVar[tuple[str, ...]] = ()

    @abc.abstractmethod
    def build(self, tree: FileTree, builder: Builder, callback: Callback | None) -> None:
        """Writes the arrays of all official images.

        They are ``images [N, C, H, W]``, ``labels [N]``, ``test [N]`` (whether an image belongs to
        the official test set) and, where there are natural groups, ``groups [N]``.
        """

    def build_options(self) -> dict[str, Any]:
        """The options that the arrays depend on."""
        return {"parts": PARTS}

    def names(self, arrays: Arrays | None = None) -> tuple[str, ...]:
        """The names of the classes, some data sets' from their files."""
        del arrays
        return self.class_names

    def load(self, root: Path) -> Federation:
        """Reads the official files and shares the images out."""
        arrays = self.arrays(root)
        labels, test = np.array(arrays["labels"]), self.test_part(arrays)
        official = None if test is None else np.flatnonzero(test)
        shared = np.arange(len(labels)) if test is None else np.flatnonzero(~test)
        groups = np.array(arrays["groups"])[shared] if "groups" in arrays else None
        images = torch.from_numpy(self.looks(arrays["images"]))
        return self.federation(
            DATASETS.name_of(type(self)),
            MappedSamples(images, torch.from_numpy(labels)),
            [shared[part] for part in self.share(labels[shared], groups)],
            num_classes=len(self.names(arrays)) or TEN,
            input_shape=tuple(images.shape[1:]),
            class_names=self.names(arrays),
            official=official,
            test_set=self.test_name(),
        )

    def test_part(self, arrays: Arrays) -> NDArray[np.bool_] | None:
        """Which images are the test set ``[N]``; None where every client's are split."""
        return np.array(arrays["test"]) if self.test == "official" else None

    def test_name(self) -> str:
        """What the test set is called in records."""
        return "official"

    def looks(self, images: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """The images ``[N, C, H, W]`` as they are to look; as they are stored by default."""
        return images

    def arrays(self, root: Path, callback: Callback | None = None) -> Arrays:
        """Decodes the images."""
        tree = self.tree(root)

        def build(builder: Builder) -> None:
            self.build(tree, builder, callback)

        name = DATASETS.name_of(type(self))
        return prepared(name, tree.sources, self.build_options(), build)

    def put_parts(
        self,
        builder: Builder,
        parts: Sequence[tuple[NDArray[np.uint8], NDArray[np.int64]]],
        folder: Path,
    ) -> None:
        """Writes the images and labels of the training files, then those of the test files."""
        images, labels = (np.concatenate(each) for each in zip(*parts, strict=True))
        test = np.arange(len(labels)) >= len(parts[0][1])
        self.put_labels(builder, labels, test, folder, len(self.names()) or TEN)
        builder.put("images", images)

    def put_labels(
        self,
        builder: Builder,
        labels: NDArray[np.int64],
        test: NDArray[np.bool_],
        folder: Path,
        num_classes: int = TEN,
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

    def arrays(self, root: Path, callback: Callback | None = None) -> Arrays:
        """Decodes the images and counts them."""
        arrays = super().arrays(root, callback)
        test = int(arrays["test"].sum())
        found = (len(arrays["test"]) - test, test)
        for part, number, wanted in zip(PARTS, found, self.counts, strict=True):
            if number != wanted and not (self.allow_missing and 0 < number < wanted):
                raise DataError(
                    f"{root / self.folder} has {number:,} instead of {wanted:,} {part} images;"
                    " fetch the files again, or accept fewer: data.allow_missing=true"
                )
        return arrays
