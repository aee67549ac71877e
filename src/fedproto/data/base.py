"""Data sets: options, official files, and a method that loads a federation from them."""

from __future__ import annotations

import abc
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from fedproto.callback import Callback
from fedproto.data.federation import Federation
from fedproto.data.files import FileTree, open_tree
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
    """A data set and how its samples are shared out among clients.

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
        if cls.is_present(root):
            return f"files in {root / cls.folder}{terms}"
        return f"no files in {root / cls.folder}{cls.how_to_get()}{terms}"

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
