"""Images in idx files: MNIST, Fashion-MNIST, and FEMNIST from the letters of EMNIST."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from fedproto.data.base import DATASETS, downloads_of
from fedproto.data.files import FileTree
from fedproto.data.official import Images, Labelled
from fedproto.data.sharing import Partition, TestSet
from fedproto.errors import DataError
from fedproto.options import option

_UNSIGNED_BYTE = 0x08
# In the labels of EMNIST's *byclass* ten digits and twenty-six capitals come before the letters.
_FIRST_LETTER, _LETTERS = 36, 10


def read_idx(tree: FileTree, name: str, dimensions: int) -> NDArray[np.uint8]:
    """Reads an idx file, which may be compressed: a magic number, the dimensions, the bytes."""
    found = tree.find(name) or tree.require(f"{name}.gz")
    content, where = tree.read(found), tree.locations[found]
    start = 4 + 4 * dimensions
    if len(content) < start or content[:4] != bytes([0, 0, _UNSIGNED_BYTE, dimensions]):
        raise DataError(f"{where} is not an idx file with {dimensions} dimensions; fetch it again")
    shape = struct.unpack(f">{dimensions}I", content[4:start])
    if len(content) != start + math.prod(shape):
        raise DataError(
            f"{where} is incomplete: {len(content) - start} bytes for {shape}; fetch it again"
        )
    if math.prod(shape) == 0:
        raise DataError(f"{where} is empty: its dimensions are {shape}; fetch it again")
    return np.frombuffer(content, dtype=np.uint8, offset=start).reshape(shape)


@DATASETS.register("mnist")
@dataclass(frozen=True)
class MNIST(Images):
    """Handwritten digits 0–9, training and test files pooled, two classes per client.

    Client u holds the digits u and u+1: five of each first, the rest in proportions that are
    ``lognormal(0, 2)``. One tenth of every client is left out first, as in the scripts published
    with FedProx. The default seed gives 62,512 samples with standard deviation 157.8, against
    61,676 and 164.7 in the paper's Table 1.

    Attributes:
        prefixes: How the names of the training and of the test files begin.
    """

    folder = "MNIST"
    licence = "CC BY-SA 3.0"
    # The authors' own page no longer serves the files; this mirror keeps them byte for byte.
    downloads = downloads_of(
        "https://ossci-datasets.s3.amazonaws.com/mnist/",
        "MNIST/raw",
        {
            "train-images-idx3-ubyte.gz": "f68b3c2dcbeaaa9fbdd348bbdeb94873",
            "train-labels-idx1-ubyte.gz": "d53e105ee54ea40749a09fcbcd1e9432",
            "t10k-images-idx3-ubyte.gz": "9fb629c4189551a2d022fa330f9573f3",
            "t10k-labels-idx1-ubyte.gz": "ec29112dd5afa0611ce80d1b7f02629c",
        },
    )
    prefixes: ClassVar[Mapping[str, str]] = {"train": "train", "test": "t10k"}

    validation: float = 0.1
    clients: int = 1000
    partition: Partition = "classes"

    def read(self, tree: FileTree, part: str) -> Labelled:
        """Images and labels of a pair of files."""
        names = [f"{self.prefixes[part]}-{kind}-ubyte" for kind in ("images-idx3", "labels-idx1")]
        images, labels = read_idx(tree, names[0], 3), read_idx(tree, names[1], 1)
        if len(images) != len(labels):
            raise DataError(
                f"{tree.folder}: {names[0]} has {len(images)} images but {names[1]}"
                f" {len(labels)} labels"
            )
        return images[:, None], labels.astype(np.int64)


@DATASETS.register("fashion-mnist")
@dataclass(frozen=True)
class FashionMNIST(MNIST):
    """Fashion-MNIST: 70,000 grey images of clothing in MNIST's files, ten classes."""

    folder = "FashionMNIST"
    licence = "MIT"
    downloads = downloads_of(
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
        "FashionMNIST/raw",
        {
            "train-images-idx3-ubyte.gz": "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
            "train-labels-idx1-ubyte.gz": "25c81989df183df01b3e8a0aad5dffbe",
            "t10k-images-idx3-ubyte.gz": "bef4ecab320f06d8554ea6380940ec79",
            "t10k-labels-idx1-ubyte.gz": "bb300cfdad3c16e7a12a480ee83cd310",
        },
    )
    class_names = (
        "T-shirt", "trouser", "pullover", "dress", "coat",
        "sandal", "shirt", "sneaker", "bag", "ankle boot",
    )  # fmt: skip

    validation: float = 0.0
    clients: int = 100
    partition: Partition = "dirichlet-equal"
    test: TestSet = "official"
    mean: tuple[float, ...] = (0.2860,)
    std: tuple[float, ...] = (0.3530,)


@DATASETS.register("femnist")
@dataclass(frozen=True)
class FEMNIST(MNIST):
    """Handwritten letters a–j, training and test files pooled, five classes per client.

    Client u holds five letters in a row and wants equally many of each; the sizes are log-normal.
    Mean and spread are those of the paper's Table 1 before one tenth of every client is left out:
    18,345 samples over 200 clients, and σ² = ln(1 + (143.0 / 82.1)²). Where a letter runs short,
    as the rare c, i and j may, its clients get fewer of it.

    With ``partition = "first"`` the letters are divided as by FedProx's script. Its images
    are NIST's own pages shrunk to 28×28 pixels; ``images = "nist-like"`` is an approximation of
    them from EMNIST: dark on white and half as large, in the middle. How large and where a letter
    was on its page EMNIST no longer tells.
    """

    folder = "EMNIST"
    licence = "public domain (NIST, Special Database 19)"
    downloads = downloads_of(
        "https://biometrics.nist.gov/cs_links/EMNIST/",
        "EMNIST/raw",
        {"gzip.zip": "58c8d27c78d21e728a6bc7b3cc06412e"},
    )
    prefixes: ClassVar[Mapping[str, str]] = {
        "train": "emnist-byclass-train",
        "test": "emnist-byclass-test",
    }

    seed: int = 21
    clients: int = 200
    partition: Partition = "class-sizes"
    classes_per_client: int = 5
    sigma: float = 1.18
    mean_size: float = 91.7
    images: Literal["emnist", "nist-like"] = option(
        "emnist", "white letters that fill the image, or small dark ones as in NIST's scans"
    )
    minimum: int = 3

    @classmethod
    def status(cls, root: Path) -> str:
        """Whether it can be loaded here, and a warning of its partition ``first``."""
        return f"{super().status(root)}; partition 'first' tests on training images"

    def read(self, tree: FileTree, part: str) -> Labelled:
        """The letters of a pair of files; EMNIST stores images transposed."""
        images, labels = super().read(tree, part)
        letters = (labels >= _FIRST_LETTER) & (labels < _FIRST_LETTER + _LETTERS)
        return images[letters].swapaxes(2, 3), labels[letters] - _FIRST_LETTER

    def preprocess(self, images: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """As they are stored, or inverted and at half their size."""
        if self.images == "emnist":
            return images
        number, _, height, width = images.shape
        cells = images.reshape(number, 1, height // 2, 2, width // 2, 2)
        page = np.full_like(images, 255)
        top, left = height // 4, width // 4
        small = cells.mean(axis=(3, 5)).round().astype(np.uint8)
        page[:, :, top : top + height // 2, left : left + width // 2] -= small
        return page
