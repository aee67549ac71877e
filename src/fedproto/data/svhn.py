"""SVHN: house numbers seen from the street, cropped to one digit each."""

from __future__ import annotations

import importlib.util
import io
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedproto.data.base import DATASETS, Download, OnProgress
from fedproto.data.files import FileTree
from fedproto.data.official import PARTS, Benchmark
from fedproto.data.prepared import Builder
from fedproto.errors import DataError, install, reason_of

_SITE = "http://ufldl.stanford.edu/housenumbers/"


@DATASETS.register("svhn")
@dataclass(frozen=True)
class SVHN(Benchmark):
    """SVHN: digits of house numbers in photographs, cropped to 32×32 pixels; needs SciPy."""

    folder = "svhn"
    licence = "non-commercial use only"
    downloads = (
        Download(
            f"{_SITE}train_32x32.mat", "svhn/train_32x32.mat", "e26dedcc434d2e4c54c9b2d4a06d8373"
        ),
        Download(
            f"{_SITE}test_32x32.mat", "svhn/test_32x32.mat", "eb5a983be6a315427106f1b164d9cef3"
        ),
    )
    class_names = tuple("0123456789")
    counts = (73_257, 26_032)

    mean: tuple[float, ...] = (0.4377, 0.4438, 0.4728)
    std: tuple[float, ...] = (0.1980, 0.2010, 0.1970)

    def build(self, tree: FileTree, builder: Builder, on_progress: OnProgress | None) -> None:
        """Reads both MAT files."""
        del on_progress
        parts = [_read(tree, f"{part}_32x32.mat") for part in PARTS]
        self.put_parts(builder, parts, tree.folder)


def _read(tree: FileTree, file: str) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
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
