"""The field's image benchmarks: CIFAR, SVHN, Tiny-ImageNet, PACS and GTSRB."""

from __future__ import annotations

import abc
import importlib.util
import io
import pickle
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedproto.callback import Callback
from fedproto.data.base import DATASETS, Download
from fedproto.data.files import FileTree
from fedproto.data.images import IMAGENET_MEAN, IMAGENET_STD, put_images
from fedproto.data.official import PARTS, Benchmark
from fedproto.data.prepared import Arrays, Builder
from fedproto.data.sharing import Partition, TestSet
from fedproto.errors import DataError, install, reason_of
from fedproto.options import option

_SHAPE = (3, 32, 32)
_PIXELS = 3 * 32 * 32
_CIFAR = "https://www.cs.toronto.edu/~kriz/"
_FINE = """
apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly
camel can castle caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup
dinosaur dolphin elephant flatfish forest fox girl hamster house kangaroo keyboard lamp lawn_mower
leopard lion lizard lobster man maple_tree motorcycle mountain mouse mushroom oak_tree orange orchid
otter palm_tree pear pickup_truck pine_tree plain plate poppy porcupine possum rabbit raccoon ray
road rocket rose sea seal shark shrew skunk skyscraper snail snake spider squirrel streetcar
sunflower sweet_pepper table tank telephone television tiger tractor train trout tulip turtle
wardrobe whale willow_tree wolf woman worm
"""
_COARSE = """
aquatic_mammals fish flowers food_containers fruit_and_vegetables household_electrical_devices
household_furniture insects large_carnivores large_man-made_outdoor_things
large_natural_outdoor_scenes large_omnivores_and_herbivores medium_mammals non-insect_invertebrates
people reptiles small_mammals trees vehicles_1 vehicles_2
"""


@dataclass(frozen=True)
class Cifar(Benchmark):
    """What both data sets share.

    Attributes:
        layouts: Folders of the binary and of the Python layout.
        files: Names of the training and of the test files, without the binary layout's ``.bin``.
        label_bytes: Labels of an image in the binary layout, one byte each.
    """

    licence = "none stated; cite Krizhevsky (2009)"
    layouts: ClassVar[tuple[str, str]]
    files: ClassVar[tuple[tuple[str, ...], tuple[str, ...]]]
    label_bytes: ClassVar[int] = 1
    counts = (50_000, 10_000)

    def label_place(self) -> tuple[int, bytes]:
        """Which byte of a binary image is its label, and the key of the labels in Python's."""
        return 0, b"labels"

    def build(self, tree: FileTree, builder: Builder, callback: Callback | None) -> None:
        """Reads the binary layout, or the Python one where only that is there."""
        del callback
        binary, python = self.layouts
        pickled = not tree.find(f"{binary}/{self.files[0][0]}.bin") and tree.find(
            f"{python}/{self.files[0][0]}"
        )
        form = f"{python}/{{}}" if pickled else f"{binary}/{{}}.bin"
        names = [[tree.require(form.format(file)) for file in part] for part in self.files]
        # All at once: a compressed archive is read from its beginning every time.
        contents = dict(tree.read_all([name for part in names for name in part]))
        read = self._read_pickled if pickled else self._read_binary
        parts = []
        for part in names:
            found = [read(contents[name], tree.locations[name]) for name in part]
            images, labels = (np.concatenate(each) for each in zip(*found, strict=True))
            parts.append((images, labels))
        self.put_parts(builder, parts, tree.folder)

    def _read_binary(
        self, content: bytes, where: object
    ) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
        record = self.label_bytes + _PIXELS
        if not content or len(content) % record:
            raise DataError(
                f"{where} is incomplete: {len(content):,} bytes are no multiple of {record:,};"
                " fetch it again"
            )
        rows = np.frombuffer(content, dtype=np.uint8).reshape(-1, record)
        images = rows[:, self.label_bytes :].reshape(-1, *_SHAPE)
        return images, rows[:, self.label_place()[0]].astype(np.int64)

    def _read_pickled(
        self, content: bytes, where: object
    ) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
        try:
            found = _InertUnpickler(content).load()
            shape, _, _, pixels = found[b"data"].state[1:]
            labels = np.array(found[self.label_place()[1]], dtype=np.int64)
            images = np.frombuffer(pixels, dtype=np.uint8).reshape(shape)
            return images.reshape(len(labels), *_SHAPE), labels
        # What a damaged file raises depends on what its bytes happen to ask for.
        except Exception as error:  # noqa: BLE001
            raise DataError(
                f"{where} does not hold {self.label_place()[1].decode()} and data as CIFAR's Python"
                f" files do ({reason_of(error)}); fetch it again"
            ) from None


class _Inert:
    """In the place of whatever a pickle names: keeps what it is given and does nothing."""

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


@DATASETS.register("cifar10")
@dataclass(frozen=True)
class CIFAR10(Cifar):
    """CIFAR-10: colour images of ten kinds of animals and vehicles, 32×32 pixels."""

    folder = "cifar10"
    downloads = (
        Download(
            f"{_CIFAR}cifar-10-binary.tar.gz",
            "cifar10/cifar-10-binary.tar.gz",
            "c32a1d4ab5d03f1284b67883e8d87530",
        ),
    )
    layouts = ("cifar-10-batches-bin", "cifar-10-batches-py")
    files = (tuple(f"data_batch_{number}" for number in range(1, 6)), ("test_batch",))
    class_names = (
        "airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck",
    )  # fmt: skip

    mean: tuple[float, ...] = (0.4914, 0.4822, 0.4465)
    std: tuple[float, ...] = (0.2470, 0.2435, 0.2616)


@DATASETS.register("cifar100")
@dataclass(frozen=True)
class CIFAR100(Cifar):
    """CIFAR-100: colour images of 100 classes in 20 superclasses, 32×32 pixels."""

    folder = "cifar100"
    downloads = (
        Download(
            f"{_CIFAR}cifar-100-binary.tar.gz",
            "cifar100/cifar-100-binary.tar.gz",
            "03b5dce01913d631647c71ecec9e9cb8",
        ),
    )
    layouts = ("cifar-100-binary", "cifar-100-python")
    files = (("train",), ("test",))
    label_bytes = 2
    class_names = tuple(_FINE.split())
    superclass_names: ClassVar[tuple[str, ...]] = tuple(_COARSE.split())

    mean: tuple[float, ...] = (0.5071, 0.4866, 0.4409)
    std: tuple[float, ...] = (0.2673, 0.2564, 0.2762)
    labels: Literal["fine", "coarse"] = option("fine", "100 classes, or 20 superclasses")

    def label_place(self) -> tuple[int, bytes]:
        """The superclass comes first in the binary layout."""
        return (1, b"fine_labels") if self.labels == "fine" else (0, b"coarse_labels")

    def names(self, arrays: Arrays | None = None) -> tuple[str, ...]:
        """Those of the classes or of the superclasses."""
        del arrays
        return self.class_names if self.labels == "fine" else self.superclass_names

    def build_options(self) -> dict[str, Any]:
        """Also which labels are read."""
        return {"parts": PARTS, "labels": self.labels}


_HOUSE_NUMBERS = "http://ufldl.stanford.edu/housenumbers/"


@DATASETS.register("svhn")
@dataclass(frozen=True)
class SVHN(Benchmark):
    """SVHN: digits of house numbers in photographs, cropped to 32×32 pixels; needs SciPy."""

    folder = "svhn"
    licence = "non-commercial use only"
    downloads = (
        Download(
            f"{_HOUSE_NUMBERS}train_32x32.mat",
            "svhn/train_32x32.mat",
            "e26dedcc434d2e4c54c9b2d4a06d8373",
        ),
        Download(
            f"{_HOUSE_NUMBERS}test_32x32.mat",
            "svhn/test_32x32.mat",
            "eb5a983be6a315427106f1b164d9cef3",
        ),
    )
    class_names = tuple("0123456789")
    counts = (73_257, 26_032)

    mean: tuple[float, ...] = (0.4377, 0.4438, 0.4728)
    std: tuple[float, ...] = (0.1980, 0.2010, 0.1970)

    def build(self, tree: FileTree, builder: Builder, callback: Callback | None) -> None:
        """Reads both MAT files."""
        del callback
        parts = [_read_mat(tree, f"{part}_32x32.mat") for part in PARTS]
        self.put_parts(builder, parts, tree.folder)


def _read_mat(tree: FileTree, file: str) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Images ``X [32, 32, 3, N]`` and labels ``y [N, 1]`` of a MAT file; label 10 is digit 0."""
    if importlib.util.find_spec("scipy") is None:
        raise DataError(f"{file} needs SciPy: {install('analysis')}")
    from scipy.io import loadmat

    name = tree.require(file)
    content, where = tree.read(name), tree.locations[name]
    try:
        found = loadmat(io.BytesIO(content), variable_names=("X", "y"))
        images, labels = np.asarray(found["X"]), np.asarray(found["y"]).ravel().astype(np.int64)
    # What a damaged file raises depends on what its bytes happen to ask for.
    except Exception as error:  # noqa: BLE001
        raise DataError(
            f"{where} is no whole MAT file ({reason_of(error)}); fetch it again"
        ) from None
    if images.dtype != np.uint8 or images.shape != (32, 32, 3, len(labels)):
        raise DataError(
            f"{where} has images {images.shape} and {len(labels)} labels, not (32, 32, 3, N) and N"
        )
    return images.transpose(3, 2, 0, 1), np.where(labels == 10, 0, labels)


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

    def build(self, tree: FileTree, builder: Builder, callback: Callback | None) -> None:
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
        put_images(builder, tree, files, 3, self.size, callback)


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

    def build(self, tree: FileTree, builder: Builder, callback: Callback | None) -> None:
        """Also keeps the words for the classes."""
        super().build(tree, builder, callback)
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
