"""Data sets: options, official files, and a method that loads a federation from them.

Many are decoded once, and kept in the cache as memory-mapped arrays that processes share. An entry
is a folder of ``.npy`` files, named by a digest of the sources' places, sizes and times and of the
options that matter. It is built under another name and renamed when it is complete; a lock keeps
two processes from building the same one.
"""

from __future__ import annotations

import abc
import hashlib
import json
import math
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

import numpy as np
from numpy.typing import DTypeLike, NDArray

from fedproto.callback import Callback
from fedproto.data.federation import Federation
from fedproto.data.files import FileTree, open_tree
from fedproto.disk.files import PARTIAL, explained, locked
from fedproto.errors import DataError
from fedproto.options import Options, Registry, option


@dataclass(frozen=True)
class Download:
    """An official file."""

    url: str
    path: str
    md5: str = ""


def downloads_of(site: str, folder: str, files: Mapping[str, str]) -> tuple[Download, ...]:
    """Files of one site, by name with their MD5 digests, that go into one folder."""
    return tuple(Download(site + name, f"{folder}/{name}", md5) for name, md5 in files.items())


MOST_FILES = 30
"""Files of a data set that a run names one by one."""


@dataclass(frozen=True)
class DataSource(Options, abc.ABC):
    """A data set and how its samples are divided among clients.

    Attributes:
        folder: Its folder below the data root; empty for what needs no files there.
        downloads: The official files.
        licence: The owners' terms; empty if there are none.
    """

    folder: ClassVar[str] = ""
    licence: ClassVar[str] = ""
    downloads: ClassVar[tuple[Download, ...]] = ()

    seed: int = option(0, "seed of generation, partition and 80/20 split", at_least=0)

    @abc.abstractmethod
    def load(self, root: Path) -> Federation:
        """Builds the federation."""

    def prepare(self, root: Path, callback: Callback | None = None) -> Any:
        """Prepares the data, such as decoding images into the cache; `load` does so otherwise."""
        return {}

    @classmethod
    def status(cls, root: Path) -> str:
        """Whether the data can be loaded here, in a few words."""
        if hasattr(cls, "path"):
            return "your own files: set data.path"
        if not cls.folder:
            return "ready (nothing to download)"
        terms = f"; licence: {cls.licence}" if cls.licence else ""
        try:
            found, advice = (
                ("files", "") if cls.is_present(root) else ("no files", cls.how_to_get())
            )
        except DataError as error:
            return str(error)
        return f"{found} in {root / cls.folder}{advice}{terms}"

    @classmethod
    def is_present(cls, root: Path) -> bool:
        """Whether there are any files in its folder, apart from interrupted downloads."""
        folder = root / cls.folder
        return not cls.folder or (folder.is_dir() and bool(open_tree(folder).sources))

    def file_sizes(self, root: Path) -> dict[str, int]:
        """Its files by name with their sizes in bytes; of many files the sum, under their number.

        An archive counts as one file.
        """
        if not self.folder or not (root / self.folder).is_dir():
            return {}
        sources = open_tree(root / self.folder).sources
        sizes = {name: path.stat().st_size for name, path in sources.items()}
        return sizes if len(sizes) <= MOST_FILES else {f"{len(sizes)} files": sum(sizes.values())}

    @classmethod
    def how_to_get(cls) -> str:
        """The remedy if files are missing, for the end of an error."""
        if not cls.downloads:
            return ""
        return f"; get them with: fedproto data fetch {DATASETS.name_of(cls)}"

    def tree(self, root: Path) -> FileTree:
        """Its files."""
        how = self.how_to_get()
        if not self.is_present(root):
            places = [f"{one.url} as {root / one.path}" for one in self.downloads]
            saved = f" (saves {', '.join(places)})" if places else ""
            raise DataError(f"there are no files in {root / self.folder}{how}{saved}")
        return open_tree(root / self.folder, how)


DATASETS: Registry[DataSource] = Registry("data set", "fedproto.data")


def data_root() -> Path:
    """The folder of downloaded data sets: ``FEDPROTO_DATA``, or a per-user cache."""
    given = os.environ.get("FEDPROTO_DATA")
    return Path(given) if given else _user_cache()


def cache_root() -> Path:
    """The folder of prepared data sets: ``FEDPROTO_CACHE``, or a per-user cache."""
    given = os.environ.get("FEDPROTO_CACHE")
    return Path(given) if given else _user_cache() / "prepared"


def _user_cache() -> Path:
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "fedproto"


FORMAT = 2
_MANIFEST = "built.json"
Arrays: TypeAlias = Mapping[str, NDArray[Any]]


class Builder:
    """A cache entry under construction."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def array(self, name: str, shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
        """A new array on disk, to be filled."""
        path = self._folder / f"{name}.npy"
        array = np.lib.format.open_memmap(path, mode="w+", dtype=dtype, shape=shape)
        if hasattr(os, "posix_fallocate"):  # writing to a map kills the process on a full disk
            with path.open("r+b") as file:
                os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
        return array

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
        return prepared(
            name, tree.sources, options, lambda builder: self.build(tree, builder, callback)
        )


def prepared(
    name: str,
    sources: Mapping[str, Path],
    options: Mapping[str, Any],
    build: Callable[[Builder], None],
) -> Arrays:
    """The arrays of a data set, from the cache or built on first use.

    They depend on the sources, told apart by place, size and time, and on `options`. An error in
    `build` leaves the cache as it was.

    Returns:
        Memory-mapped arrays by name; changes to them stay in this process.
    """
    root = cache_root()
    states = [[each, str(path.absolute()), *_state(path)] for each, path in sorted(sources.items())]
    key = json.dumps([FORMAT, name, options, states], sort_keys=True)
    entry = root / f"{name}-{hashlib.sha256(key.encode()).hexdigest()[:20]}"
    try:
        root.mkdir(parents=True, exist_ok=True)
        if not _is_whole(entry):
            with locked(entry.with_suffix(".lock"), math.inf):
                # Another process may have built it while this one waited for the lock.
                if not _is_whole(entry):
                    shutil.rmtree(entry, ignore_errors=True)
                    _build(entry, build)
        return {path.stem: np.load(path, mmap_mode="c") for path in sorted(entry.glob("*.npy"))}
    except OSError as error:
        raise DataError(
            f"prepared data in {entry} cannot be written or read: {error.strerror or error};"
            " choose another folder with FEDPROTO_CACHE"
        ) from None


def _state(path: Path) -> list[int]:
    """Size and time, which tell whether a file is still the same."""
    with explained(path, " cannot be read", "", DataError):
        status = path.stat()
    return [status.st_size, status.st_mtime_ns]


def _is_whole(entry: Path) -> bool:
    """Whether all arrays of an entry are there, as they were written."""
    try:
        built = json.loads((entry / _MANIFEST).read_bytes())
        return all(_state(entry / name) == state for name, state in built.items())
    except (OSError, ValueError, DataError):
        return False


def _build(entry: Path, build: Callable[[Builder], None]) -> None:
    partial = entry.with_suffix(PARTIAL)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        build(Builder(partial))
        for path in partial.iterdir():
            with path.open("rb") as file:
                os.fsync(file.fileno())
        built = {path.name: _state(path) for path in partial.glob("*.npy")}
        (partial / _MANIFEST).write_text(json.dumps(built))
        partial.rename(entry)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
