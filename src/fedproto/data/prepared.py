"""Prepared data sets: decoded once, kept as memory-mapped arrays, shared by processes.

An entry is a folder of ``.npy`` files in the cache, named by a digest of the sources' content and
of the options that matter. It is built under another name and renamed when it is complete; a lock
keeps two processes from building the same one.
"""

from __future__ import annotations

import abc
import contextlib
import hashlib
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

import numpy as np
from numpy.typing import DTypeLike, NDArray

from fedproto.callback import Callback
from fedproto.data.base import DATASETS, DataSource, cache_root
from fedproto.data.files import FileTree, explained
from fedproto.disk.files import PARTIAL, locked, open_regular, write_atomically
from fedproto.disk.integrity import DamagedError, read_json
from fedproto.errors import DataError

FORMAT = 1
_MANIFEST = "built.json"
Arrays: TypeAlias = Mapping[str, NDArray[Any]]


class Builder:
    """A cache entry under construction."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def array(self, name: str, shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
        """A new array on disk, to be filled."""
        path = self._folder / f"{name}.npy"
        return np.lib.format.open_memmap(path, mode="w+", dtype=dtype, shape=shape)

    def put(self, name: str, values: NDArray[Any]) -> None:
        """Keeps an array as it is."""
        np.save(self._folder / f"{name}.npy", np.ascontiguousarray(values), allow_pickle=False)


class Prepared(DataSource):
    """A data set whose files are decoded once.

    Attributes:
        prepared_as: How entries in the cache are called; as the data set by default.
        prepared_by: Names of the options that the arrays depend on.
    """

    prepared_as: ClassVar[str] = ""
    prepared_by: ClassVar[tuple[str, ...]] = ()

    @abc.abstractmethod
    def build(self, tree: FileTree, builder: Builder, callback: Callback | None) -> None:
        """Writes the arrays."""

    def prepare(self, root: Path, callback: Callback | None = None) -> Arrays:
        """The arrays, from the cache or built now."""
        tree, name = self.tree(root), self.prepared_as or DATASETS.name_of(type(self))
        options = {option: getattr(self, option) for option in self.prepared_by}

        def build(builder: Builder) -> None:
            self.build(tree, builder, callback)

        return prepared(name, tree.sources, options, build)


def prepared(
    name: str,
    sources: Mapping[str, Path],
    options: Mapping[str, Any],
    build: Callable[[Builder], None],
) -> Arrays:
    """The arrays of a data set, from the cache or built on first use.

    They depend on the content of the sources and on `options`. An error in `build` leaves the cache
    as it was.

    Returns:
        Memory-mapped arrays by name; changes to them stay in this process.
    """
    root = cache_root()
    with _cache_errors(root):
        root.mkdir(parents=True, exist_ok=True)
    key = json.dumps([FORMAT, name, options, _content_digest(sources, root)], sort_keys=True)
    entry = root / f"{name}-{hashlib.sha256(key.encode()).hexdigest()[:20]}"
    lock = entry.with_suffix(".lock")
    with _cache_errors(entry):
        if not entry.is_dir():
            with locked(lock, math.inf):
                # Another process may have built it while this one waited for the lock.
                if not entry.is_dir():
                    _build(entry, build)
        try:
            return _open(entry)
        # What a file that is no array raises depends on its bytes.
        except (ValueError, EOFError, SyntaxError, TypeError, DamagedError, FileNotFoundError):
            with locked(lock, math.inf):
                shutil.rmtree(entry, ignore_errors=True)
                _build(entry, build)
        return _open(entry)


def _open(entry: Path) -> Arrays:
    """The arrays of an entry; their content is read only where a file was touched."""
    manifest = entry / _MANIFEST
    known = read_json(manifest.read_bytes()) if manifest.exists() else {}
    for name, (size, changed, digest) in known.items():
        status = (entry / name).stat()
        touched = (status.st_size, status.st_mtime_ns) != (size, changed)
        if touched and _state(entry / name)[-1] != digest:
            raise DamagedError(f"{name} was changed after it was written")
    return {path.stem: np.load(path, mmap_mode="c") for path in sorted(entry.glob("*.npy"))}


def _state(path: Path) -> list[Any]:
    """A file's size, time and digest."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    status = path.stat()
    return [status.st_size, status.st_mtime_ns, digest]


def _build(entry: Path, build: Callable[[Builder], None]) -> None:
    partial = entry.with_suffix(PARTIAL)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        build(Builder(partial))
        for path in partial.iterdir():
            with path.open("rb") as file:
                os.fsync(file.fileno())
        built = {path.name: _state(path) for path in sorted(partial.glob("*.npy"))}
        (partial / _MANIFEST).write_text(json.dumps(built))
        partial.rename(entry)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _content_digest(sources: Mapping[str, Path], root: Path) -> str:
    """A digest of names and bytes; remembered for files whose size and time did not change."""
    signature = hashlib.sha256()
    for name, path in sorted(sources.items()):
        with explained(path):
            stat = path.stat()
        signature.update(
            f"{name}\0{path}\0{stat.st_size}\0{stat.st_mtime_ns}\0".encode(errors="surrogateescape")
        )
    memo = root / "digests" / signature.hexdigest()
    with contextlib.suppress(OSError):
        return memo.read_text()
    content = hashlib.sha256()
    for name, path in sorted(sources.items()):
        with explained(path), open_regular(path) as file:
            content.update(f"{name}\0{hashlib.file_digest(file, 'sha256').hexdigest()}\0".encode())
    digest = content.hexdigest()
    with _cache_errors(root):
        memo.parent.mkdir(exist_ok=True)
        write_atomically(memo, digest.encode())
    return digest


@contextlib.contextmanager
def _cache_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DataError(
            f"prepared data in {path} cannot be written or read: {error.strerror or error};"
            " choose another folder with FEDPROTO_CACHE"
        ) from None
