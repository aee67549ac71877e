"""FEMNIST: the lower-case letters a–j of EMNIST *byclass*, five classes per client."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from fedproto.data.base import DATASETS, Download
from fedproto.data.files import FileTree
from fedproto.data.idx import IdxImages, read_images_and_labels
from fedproto.data.sharing import Partition
from fedproto.options import option

# In the labels of *byclass* ten digits and twenty-six capitals come before the small letters.
_FIRST, _CLASSES = 36, 10


@DATASETS.register("femnist")
@dataclass(frozen=True)
class FEMNIST(IdxImages):
    """Handwritten letters a–j, training and test files pooled, five classes per client.

    Client u holds five letters in a row and wants equally many of each; the sizes are log-normal.
    Mean and spread are those of the paper's Table 1 before one tenth of every client is left out:
    18,345 samples over 200 clients, and σ² = ln(1 + (143.0 / 82.1)²). Where a letter runs short,
    as the rare c, i and j may, its clients get fewer of it.

    With ``partition = "first"`` the letters are shared out as FedProx's script does it. Its images
    are NIST's own pages shrunk to 28×28 pixels; ``images = "nist-like"`` is an approximation of
    them from EMNIST: dark on white and half as large, in the middle. How large and where a letter
    was on its page EMNIST no longer tells.
    """

    folder = "EMNIST"
    licence = "public domain (NIST, Special Database 19)"
    downloads = (
        Download(
            "https://biometrics.nist.gov/cs_links/EMNIST/gzip.zip",
            "EMNIST/raw/gzip.zip",
            "58c8d27c78d21e728a6bc7b3cc06412e",
        ),
    )

    seed: int = option(11, "seed of partition and splits", at_least=0)
    clients: int = 200
    partition: Partition = "class-sizes"
    classes_per_client: int = 5
    sigma: float = 1.18
    mean_size: float = 91.7
    images: Literal["emnist", "nist-like"] = option(
        "emnist", "white letters that fill the image, or dark small ones, much as NIST scanned them"
    )
    minimum: int = 3

    def read(self, tree: FileTree, part: str) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
        """The letters of a pair of files; EMNIST stores images transposed."""
        prefix = f"emnist-byclass-{part}"
        pixels, classes = read_images_and_labels(
            tree, f"{prefix}-images-idx3-ubyte", f"{prefix}-labels-idx1-ubyte"
        )
        letters = (classes >= _FIRST) & (classes < _FIRST + _CLASSES)
        return pixels[letters].transpose(0, 2, 1), classes[letters] - _FIRST

    def looks(self, images: NDArray[np.uint8]) -> NDArray[np.uint8]:
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
