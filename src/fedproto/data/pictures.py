"""Data sets of single picture files: Tiny-ImageNet, PACS and GTSRB."""

from __future__ import annotations

import abc
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedproto.data.base import DATASETS, Download, OnProgress
from fedproto.data.files import FileTree
from fedproto.data.images import IMAGENET_MEAN, IMAGENET_STD, put_images
from fedproto.data.official import PARTS, Benchmark
from fedproto.data.prepared import Arrays, Builder
from fedproto.data.sharing import Partition, TestSet
from fedproto.errors import DataError
from fedproto.options import option


class Picture(NamedTuple):
    """A file, its class by name, whether it is of the official test set, and its natural group."""

    file: str
    label: str
    test: bool = False
    group: int = 0


@dataclass(frozen=True)
class PictureFiles(Benchmark):
    """Picture files, brought to one size."""

    size: int = option(32, "width and height that all pictures are brought to", at_least=8)

    @abc.abstractmethod
    def listing(self, tree: FileTree) -> tuple[Sequence[Picture], Sequence[str]]:
        """All pictures, and the names of their classes in the order of the labels."""

    def build_options(self) -> dict[str, Any]:
        """Also the size."""
        return {"parts": PARTS, "size": self.size}

    def build(self, tree: FileTree, builder: Builder, on_progress: OnProgress | None) -> None:
        """Decodes the pictures."""
        pictures, classes = self.listing(tree)
        if not pictures:
            raise DataError(f"{tree.folder} holds no pictures as the official files name them")
        label_of = {name: label for label, name in enumerate(classes)}
        for picture in pictures:
            if picture.label not in label_of:
                raise DataError(f"{tree.locations[picture.file]}: unknown class '{picture.label}'")
        labels = np.array([label_of[picture.label] for picture in pictures], dtype=np.int64)
        test = np.array([picture.test for picture in pictures])
        self.put_labels(builder, labels, test, tree.folder, len(classes))
        builder.put("groups", np.array([picture.group for picture in pictures]))
        files = [picture.file for picture in pictures]
        put_images(builder, tree, files, 3, self.size, on_progress)


@DATASETS.register("tiny-imagenet")
@dataclass(frozen=True)
class TinyImageNet(PictureFiles):
    """Tiny-ImageNet: 200 classes of ImageNet at 64×64 pixels; its validation part is the test set.

    The labels of the official test part are not public.
    """

    folder = "tiny-imagenet"
    licence = "ImageNet's terms: non-commercial research and education"
    downloads = (
        Download(
            "http://cs231n.stanford.edu/tiny-imagenet-200.zip",
            "tiny-imagenet/tiny-imagenet-200.zip",
            "90528d7ca1a48142e341f4ef8d21d0de",
        ),
    )
    counts = (100_000, 10_000)

    size: int = 64
    mean: tuple[float, ...] = (0.4802, 0.4481, 0.3975)
    std: tuple[float, ...] = (0.2770, 0.2691, 0.2821)

    def listing(self, tree: FileTree) -> tuple[Sequence[Picture], Sequence[str]]:
        """Training pictures by their folders, those of validation by the annotations."""
        classes = _lines(tree, "wnids.txt")
        rows = [line.split("\t") for line in _lines(tree, "val/val_annotations.txt")]
        label_of = {row[0]: row[1] for row in rows if len(row) > 1}
        trained = _matching(tree, r"train/(n\d{8})/images/[^/]+\.JPEG")
        tested = _matching(tree, r"val/images/([^/]+\.JPEG)")
        pictures = [Picture(file, found[1]) for file, found in trained]
        for file, found in tested:
            if found[1] not in label_of:
                raise DataError(f"{tree.folder}: val_annotations.txt does not name {found[1]}")
            pictures.append(Picture(file, label_of[found[1]], test=True))
        return pictures, classes

    def build(self, tree: FileTree, builder: Builder, on_progress: OnProgress | None) -> None:
        """Also keeps the words for the classes."""
        super().build(tree, builder, on_progress)
        word_of = dict(line.partition("\t")[::2] for line in _lines(tree, "words.txt"))
        names = [word_of.get(name, name).partition(",")[0] for name in _lines(tree, "wnids.txt")]
        builder.put("names", np.array([name.encode() for name in names]))

    def names(self, arrays: Arrays | None = None) -> tuple[str, ...]:
        """The first word for each class."""
        return () if arrays is None else tuple(name.decode() for name in arrays["names"])


_TRAFFIC_SIGNS = "https://sid.erda.dk/public/archives/daaeac0d7ce1152aea9b61d9f1e19370/"
_DOMAINS = ("art_painting", "cartoon", "photo", "sketch")


@DATASETS.register("pacs")
@dataclass(frozen=True)
class PACS(PictureFiles):
    """PACS: seven classes in four domains (photos, art, cartoons, sketches), which are the clients.

    With ``unseen = "sketch"`` nobody trains on the sketches, and they are the test set: the usual
    test of how a model generalises to a domain that it has not seen.
    """

    folder = "pacs"
    licence = "none stated; cite Li et al. (2017)"
    downloads = (
        Download(
            "https://drive.usercontent.google.com/download?export=download&confirm=t"
            "&id=1JFr8f805nMUelQWWmfnJR3y4_SYoN5Pd",
            "pacs/PACS.zip",
        ),
    )
    class_names = ("dog", "elephant", "giraffe", "guitar", "horse", "house", "person")
    counts = (9_991, 0)

    clients: int = 4
    partition: Partition = "groups"
    test: TestSet = 0.2
    size: int = 64
    mean: tuple[float, ...] = IMAGENET_MEAN
    std: tuple[float, ...] = IMAGENET_STD
    unseen: Literal["none", "art_painting", "cartoon", "photo", "sketch"] = option(
        "none", "a domain that no client has, as the test set"
    )

    def listing(self, tree: FileTree) -> tuple[Sequence[Picture], Sequence[str]]:
        """A folder per domain, and in it one per class."""
        domains, classes = "|".join(_DOMAINS), "|".join(self.class_names)
        found = _matching(tree, rf"({domains})/({classes})/[^/]+\.(?:jpg|png)")
        pictures = [Picture(file, m[2], group=_DOMAINS.index(m[1])) for file, m in found]
        return pictures, self.class_names

    def test_part(self, arrays: Arrays) -> NDArray[np.bool_] | None:
        """The pictures of the unseen domain."""
        if self.unseen == "none":
            return None
        return np.equal(arrays["groups"], _DOMAINS.index(self.unseen))

    def test_name(self) -> str:
        """By the domain."""
        return f"unseen domain {self.unseen}"


@DATASETS.register("gtsrb")
@dataclass(frozen=True)
class GTSRB(PictureFiles):
    """GTSRB: photographs of German traffic signs, 43 classes, brought to 32×32 pixels."""

    folder = "gtsrb"
    licence = "none stated; cite Stallkamp et al. (2012)"
    downloads = tuple(
        Download(_TRAFFIC_SIGNS + name, f"gtsrb/{name}", md5)
        for name, md5 in (
            ("GTSRB-Training_fixed.zip", "513f3c79a4c5141765e10e952eaa2478"),
            ("GTSRB_Final_Test_Images.zip", "c7e4e6327067d32654124b0fe9e82185"),
            ("GTSRB_Final_Test_GT.zip", "fe31e9c9270bbcd7b84b7f21a9d9d9e5"),
        )
    )
    counts = (26_640, 12_630)
    class_names = tuple(
        [f"limit {speed}" for speed in (20, 30, 50, 60, 70, 80)]
        + ["end of limit 80", "limit 100", "limit 120", "no passing", "no passing by lorries"]
        + ["right of way", "priority road", "yield", "stop", "no vehicles", "no lorries"]
        + ["no entry", "danger", "curve left", "curve right", "double curve", "bumpy road"]
        + ["slippery road", "road narrows", "road works", "traffic signals", "pedestrians"]
        + ["children", "bicycles", "snow", "wild animals", "end of limits", "turn right"]
        + ["turn left", "ahead only", "ahead or right", "ahead or left", "keep right", "keep left"]
        + ["roundabout", "end of no passing", "end of no passing by lorries"]
    )

    mean: tuple[float, ...] = (0.3403, 0.3121, 0.3214)
    std: tuple[float, ...] = (0.2724, 0.2608, 0.2669)

    def listing(self, tree: FileTree) -> tuple[Sequence[Picture], Sequence[str]]:
        """Training pictures by their folders, those of the test by the final list."""
        numbers = [f"{label:05d}" for label in range(len(self.class_names))]
        rows = [line.split(";") for line in _lines(tree, "GT-final_test.csv")[1:]]
        label_of = {row[0]: row[-1].zfill(5) for row in rows}
        pictures = [
            Picture(file, found[1])
            for file, found in _matching(tree, r"Training/(\d{5})/[^/]+\.ppm")
        ]
        for file, found in _matching(tree, r"Final_Test/Images/([^/]+\.ppm)"):
            if found[1] not in label_of:
                raise DataError(f"{tree.folder}: GT-final_test.csv does not name {found[1]}")
            pictures.append(Picture(file, label_of[found[1]], test=True))
        return pictures, numbers


def _lines(tree: FileTree, file: str) -> list[str]:
    return tree.read(tree.require(file)).decode("utf-8", "replace").splitlines()


def _matching(tree: FileTree, pattern: str) -> list[tuple[str, re.Match[str]]]:
    """Files whose path ends as a pattern says, sorted by that end, an unpacked one first."""
    found: dict[str, tuple[str, re.Match[str]]] = {}
    ends = re.compile(rf"(?:^|.*/)(?P<end>{pattern})")
    for name in sorted(tree.locations, key=lambda name: bool(tree.locations[name].member)):
        match = re.fullmatch(pattern, name) or (
            re.fullmatch(pattern, outer["end"]) if (outer := ends.fullmatch(name)) else None
        )
        if match is not None:
            found.setdefault(match[0], (name, match))
    return [found[end] for end in sorted(found)]
