"""CIFAR-10 and CIFAR-100: 60,000 colour images of 32×32 pixels, binary or Python layout."""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from fedproto.data.base import DATASETS, Download, OnProgress
from fedproto.data.files import FileTree
from fedproto.data.official import PARTS, Benchmark
from fedproto.data.prepared import Arrays, Builder
from fedproto.errors import DataError, reason_of
from fedproto.options import option

_SHAPE = (3, 32, 32)
_PIXELS = 3 * 32 * 32
_SITE = "https://www.cs.toronto.edu/~kriz/"
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

    def build(self, tree: FileTree, builder: Builder, on_progress: OnProgress | None) -> None:
        """Reads the binary layout, or the Python one where only that is there."""
        del on_progress
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
            f"{_SITE}cifar-10-binary.tar.gz",
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
            f"{_SITE}cifar-100-binary.tar.gz",
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
