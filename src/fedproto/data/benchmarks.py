"""The field's image benchmarks: CIFAR, SVHN, Tiny-ImageNet and PACS."""

from __future__ import annotations

import abc
import importlib.util
import io
import pickle
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from fedproto.callback import Callback
from fedproto.data.base import DATASETS, Arrays, Builder, Download, downloads_of
from fedproto.data.files import FileTree
from fedproto.data.images import IMAGENET_MEAN, IMAGENET_STD
from fedproto.data.official import Benchmark, Labelled, Picture, check_labels, put_pictures
from fedproto.data.sharing import Partition, TestSet
from fedproto.errors import DataError, install, reason_of
from fedproto.options import option

_CIFAR100 = """
apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly
camel can castle caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup
dinosaur dolphin elephant flatfish forest fox girl hamster house kangaroo keyboard lamp lawn_mower
leopard lion lizard lobster man maple_tree motorcycle mountain mouse mushroom oak_tree orange orchid
otter palm_tree pear pickup_truck pine_tree plain plate poppy porcupine possum rabbit raccoon ray
road rocket rose sea seal shark shrew skunk skyscraper snail snake spider squirrel streetcar
sunflower sweet_pepper table tank telephone television tiger tractor train trout tulip turtle
wardrobe whale willow_tree wolf woman worm
"""


@DATASETS.register("cifar10")
@dataclass(frozen=True)
class CIFAR10(Benchmark):
    """CIFAR-10: colour images of ten kinds of animals and vehicles, 32×32 pixels.

    Attributes:
        layouts: Folders of the binary and of the Python layout.
        files: Names of the training and of the test files, without the binary layout's ``.bin``.
        label_bytes: Labels of an image in the binary layout, one byte each; the last one counts.
        label_key: Key of the labels in the Python layout.
    """

    folder = "cifar10"
    licence = "none stated; cite Krizhevsky (2009)"
    downloads = downloads_of(
        "https://www.cs.toronto.edu/~kriz/",
        "cifar10",
        {"cifar-10-binary.tar.gz": "c32a1d4ab5d03f1284b67883e8d87530"},
    )
    layouts: ClassVar[tuple[str, str]] = ("cifar-10-batches-bin", "cifar-10-batches-py")
    files: ClassVar[Mapping[str, Sequence[str]]] = {
        "train": [f"data_batch_{number}" for number in range(1, 6)],
        "test": ["test_batch"],
    }
    label_bytes: ClassVar[int] = 1
    label_key: ClassVar[bytes] = b"labels"
    counts = (50_000, 10_000)
    class_names: ClassVar[tuple[str, ...]] = (
        "airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck",
    )  # fmt: skip

    mean: tuple[float, ...] = (0.4914, 0.4822, 0.4465)
    std: tuple[float, ...] = (0.2470, 0.2435, 0.2616)

    def read(self, tree: FileTree, part: str) -> Labelled:
        """Reads the binary layout, or the Python one where only that is there."""
        binary, python = self.layouts
        first = self.files["train"][0]
        pickled = not tree.find(f"{binary}/{first}.bin") and tree.find(f"{python}/{first}")
        form = f"{python}/{{}}" if pickled else f"{binary}/{{}}.bin"
        names = [tree.require(form.format(file)) for file in self.files[part]]
        # All at once: a compressed archive is read from its beginning every time.
        contents = dict(tree.read_all(names))
        read = self._read_pickled if pickled else self._read_binary
        found = [read(contents[name], tree.locations[name]) for name in names]
        rows, labels = (np.concatenate(each) for each in zip(*found, strict=True))
        return rows.reshape(-1, 3, 32, 32), labels.astype(np.int64)

    def _read_binary(self, content: bytes, where: object) -> Labelled:
        record = self.label_bytes + 3 * 32 * 32
        if not content or len(content) % record:
            raise DataError(
                f"{where} is incomplete: {len(content):,} bytes are not a multiple of {record:,};"
                " fetch it again"
            )
        rows = np.frombuffer(content, dtype=np.uint8).reshape(-1, record)
        return rows[:, self.label_bytes :], rows[:, self.label_bytes - 1].astype(np.int64)

    def _read_pickled(self, content: bytes, where: object) -> Labelled:
        try:
            found = _InertUnpickler(content).load()
            shape, _, _, pixels = found[b"data"].state[1:]
            labels = np.array(found[self.label_key], dtype=np.int64)
            images = np.frombuffer(pixels, dtype=np.uint8).reshape(shape)
            return images.reshape(len(labels), 3 * 32 * 32), labels
        # What a damaged file raises depends on what its bytes happen to ask for.
        except Exception as error:  # noqa: BLE001
            raise DataError(
                f"{where} does not hold {self.label_key.decode()} and data as CIFAR's Python files"
                f" do ({reason_of(error)}); fetch it again"
            ) from None


class _Inert:
    """Stands for an object that a pickle names: keeps what it is given and does nothing."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments
        self.state: Sequence[Any] = ()

    def __setstate__(self, state: Sequence[Any]) -> None:
        self.state = state


class _InertUnpickler(pickle.Unpickler):
    """Reads the layout of a pickle and calls nothing that it names."""

    _NAMES = (("_reconstruct", "multiarray"), ("ndarray", "numpy"), ("dtype", "numpy"))

    def __init__(self, content: bytes) -> None:
        super().__init__(io.BytesIO(content), encoding="bytes")

    def find_class(self, module: str, name: str) -> Any:
        """Numpy's array and its parts become inert; everything else is refused."""
        if (name, module.rpartition(".")[2]) not in self._NAMES:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}")
        return _Inert


@DATASETS.register("cifar100")
@dataclass(frozen=True)
class CIFAR100(CIFAR10):
    """CIFAR-100: colour images of 100 classes, 32×32 pixels."""

    folder = "cifar100"
    downloads = downloads_of(
        "https://www.cs.toronto.edu/~kriz/",
        "cifar100",
        {"cifar-100-binary.tar.gz": "03b5dce01913d631647c71ecec9e9cb8"},
    )
    layouts = ("cifar-100-binary", "cifar-100-python")
    files: ClassVar[Mapping[str, Sequence[str]]] = {"train": ["train"], "test": ["test"]}
    label_bytes = 2  # the superclass comes first
    label_key = b"fine_labels"
    class_names: ClassVar[tuple[str, ...]] = tuple(_CIFAR100.split())

    mean: tuple[float, ...] = (0.5071, 0.4865, 0.4409)
    std: tuple[float, ...] = (0.2673, 0.2564, 0.2762)


@DATASETS.register("svhn")
@dataclass(frozen=True)
class SVHN(Benchmark):
    """SVHN: digits of house numbers in photographs, cropped to 32×32 pixels; needs SciPy."""

    folder = "svhn"
    licence = "non-commercial use only"
    downloads = downloads_of(
        "http://ufldl.stanford.edu/housenumbers/",
        "svhn",
        {
            "train_32x32.mat": "e26dedcc434d2e4c54c9b2d4a06d8373",
            "test_32x32.mat": "eb5a983be6a315427106f1b164d9cef3",
        },
    )
    class_names = tuple("0123456789")
    counts = (73_257, 26_032)

    mean: tuple[float, ...] = (0.4377, 0.4438, 0.4728)
    std: tuple[float, ...] = (0.1980, 0.2010, 0.1970)

    def read(self, tree: FileTree, part: str) -> Labelled:
        """Images ``X [32, 32, 3, N]`` and labels ``y [N, 1]``, in which 10 is the digit 0."""
        name = tree.require(f"{part}_32x32.mat")
        if importlib.util.find_spec("scipy") is None:
            raise DataError(f"{name} needs SciPy: {install('analysis')}")
        from scipy.io import loadmat

        content, where = tree.read(name), tree.locations[name]
        try:
            found = loadmat(io.BytesIO(content), variable_names=("X", "y"))
            images, labels = np.asarray(found["X"]), np.asarray(found["y"]).ravel().astype(np.int64)
        # What a damaged file raises depends on what its bytes happen to ask for.
        except Exception as error:  # noqa: BLE001
            raise DataError(
                f"{where} is not a complete MAT file ({reason_of(error)}); fetch it again"
            ) from None
        if images.dtype != np.uint8 or images.shape != (32, 32, 3, len(labels)):
            raise DataError(
                f"{where} has images {images.shape} and {len(labels)} labels, not (32, 32, 3, N)"
                " and N"
            )
        return images.transpose(3, 2, 0, 1), np.where(labels == 10, 0, labels)


@dataclass(frozen=True)
class PictureFiles(Benchmark):
    """Image files, resized to one size."""

    prepared_by = ("size",)

    size: int = option(32, "width and height to which images are resized, in pixels", at_least=8)

    def classes(self, tree: FileTree) -> Sequence[str]:
        """What the classes are called in paths and lists, in the order of the labels."""
        return self.class_names

    @abc.abstractmethod
    def listing(self, tree: FileTree) -> list[Picture]:
        """All pictures."""

    def build(self, tree: FileTree, builder: Builder, callback: Callback | None) -> None:
        """Decodes the pictures."""
        pictures, classes = self.listing(tree), self.classes(tree)
        if not pictures:
            raise DataError(f"{tree.folder} contains no images with the official names")
        labels = put_pictures(builder, tree, pictures, classes, (3, self.size), callback)
        check_labels(labels, len(classes), tree.folder)


@DATASETS.register("tiny-imagenet")
@dataclass(frozen=True)
class TinyImageNet(PictureFiles):
    """Tiny-ImageNet: 200 classes of ImageNet at 64×64 pixels; its validation part is the test set.

    The labels of the official test part are not public.
    """

    folder = "tiny-imagenet"
    licence = "ImageNet's terms: non-commercial research and education"
    downloads = downloads_of(
        "http://cs231n.stanford.edu/",
        "tiny-imagenet",
        {"tiny-imagenet-200.zip": "90528d7ca1a48142e341f4ef8d21d0de"},
    )
    counts = (100_000, 10_000)

    size: int = 64
    mean: tuple[float, ...] = (0.4802, 0.4481, 0.3975)
    std: tuple[float, ...] = (0.2770, 0.2691, 0.2821)

    def classes(self, tree: FileTree) -> Sequence[str]:
        """By WordNet's numbers."""
        return _lines(tree, "wnids.txt")

    def listing(self, tree: FileTree) -> list[Picture]:
        """The pictures for training by their folders, those of the test by the annotations."""
        rows = [line.split("\t") for line in _lines(tree, "val/val_annotations.txt")]
        label_of = {row[0]: row[1] for row in rows if len(row) > 1}
        train = _matching(tree, r"train/(n\d{8})/images/[^/]+\.JPEG")
        pictures = [Picture(file, match[1]) for file, match in train]
        for file, match in _matching(tree, r"val/images/([^/]+\.JPEG)"):
            if match[1] not in label_of:
                raise DataError(f"{tree.folder}: the list of test labels does not name {match[1]}")
            pictures.append(Picture(file, label_of[match[1]], test=True))
        return pictures

    def build(self, tree: FileTree, builder: Builder, callback: Callback | None) -> None:
        """Also keeps the first word for each class."""
        super().build(tree, builder, callback)
        word_of = dict(line.partition("\t")[::2] for line in _lines(tree, "words.txt"))
        names = [word_of.get(name, name).partition(",")[0] for name in self.classes(tree)]
        builder.put("names", np.array([name.encode() for name in names]))


@DATASETS.register("pacs")
@dataclass(frozen=True)
class PACS(PictureFiles):
    """PACS: seven classes in four domains (photos, art, cartoons, sketches), which are the clients.

    With ``unseen = "sketch"`` no client trains on the sketches, which are the test set: the usual
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
    domains: ClassVar[tuple[str, ...]] = ("art_painting", "cartoon", "photo", "sketch")
    counts = (9_991, 0)

    clients: int = 4
    partition: Partition = "groups"
    test: TestSet = 0.2
    size: int = 64
    mean: tuple[float, ...] = IMAGENET_MEAN
    std: tuple[float, ...] = IMAGENET_STD
    unseen: Literal["none", "art_painting", "cartoon", "photo", "sketch"] = option(
        "none", "domain that is held out from all clients and used as the test set"
    )

    def listing(self, tree: FileTree) -> list[Picture]:
        """A folder per domain, and in it one per class."""
        domains, classes = "|".join(self.domains), "|".join(self.class_names)
        found = _matching(tree, rf"({domains})/({classes})/[^/]+\.(?:jpg|png)")
        return [Picture(file, match[2], group=match[1]) for file, match in found]

    def test_part(self, arrays: Arrays) -> tuple[NDArray[np.bool_], str] | None:
        """The pictures of the unseen domain."""
        if self.unseen == "none":
            return None
        return np.equal(arrays["groups"], self.unseen), f"unseen domain {self.unseen}"


def _lines(tree: FileTree, file: str) -> list[str]:
    return tree.read(tree.require(file)).decode("utf-8", "replace").splitlines()


def _matching(tree: FileTree, pattern: str) -> list[tuple[str, re.Match[str]]]:
    """Files whose path ends as a pattern says, sorted by that end, an unpacked one first."""
    found: dict[str, tuple[str, re.Match[str]]] = {}
    compiled = re.compile(pattern)
    for name in sorted(tree.locations, key=lambda name: bool(tree.locations[name].member)):
        starts = [0, *(match.end() for match in re.finditer("/", name))]
        matches = (compiled.fullmatch(name, start) for start in starts)
        match = next(filter(None, matches), None)
        if match is not None:
            found.setdefault(match[0], (name, match))
    return [found[end] for end in sorted(found)]
