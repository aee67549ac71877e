"""Files for tests of data sets: real ones where there are any, and small ones made here."""

from __future__ import annotations

import gzip
import io
import struct
import tarfile
import zipfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from fedproto.data import data_root
from fedproto.data.files import open_tree


def needs_real(folder: str) -> Path:
    """The folder of a real data set; skips the test where it is not there."""
    found = data_root() / folder
    if not (found.is_dir() and open_tree(found).sources):
        pytest.skip(f"needs the files of {folder} in the data root (FEDPROTO_DATA)")
    return found


def idx_bytes(array: np.ndarray) -> bytes:
    header = bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
    return header + array.astype(np.uint8).tobytes()


def write_mnist(root: Path, labels: np.ndarray, *, size: int = 28) -> np.ndarray:
    """Four small files in MNIST's layout; a fifth of the images are in the test files."""
    images = np.random.RandomState(0).randint(0, 256, (len(labels), size, size))
    cut = len(labels) * 4 // 5
    raw = root / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for part, where in (("train", slice(None, cut)), ("t10k", slice(cut, None))):
        for kind, array in (("images-idx3", images), ("labels-idx1", labels)):
            path = raw / f"{part}-{kind}-ubyte.gz"
            path.write_bytes(gzip.compress(idx_bytes(array[where])))
    return images


def image_bytes(array: np.ndarray, format: str = "PNG") -> bytes:
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(array).save(file, format)
    return file.getvalue()


def write_zip(path: Path, members: Mapping[str, bytes]) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)


def write_tar(path: Path, members: Mapping[str, bytes], mode: str = "w") -> None:
    with tarfile.open(path, mode) as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
