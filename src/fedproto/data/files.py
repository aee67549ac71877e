"""Finding a data set's files, unpacked in a folder or inside the archives in it.

Nothing is ever unpacked to disk: members are read where they are, so an archive cannot write
anywhere.
"""

from __future__ import annotations

import contextlib
import gzip
import lzma
import os
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, cast

from fedproto.disk.files import PARTIAL, check_limit, explained, open_regular, read_limited
from fedproto.errors import DataError, printable
from fedproto.options import is_unicode

ARCHIVES = (".zip", ".tar", ".tar.gz", ".tgz")

_OF_READERS = (zipfile.BadZipFile, tarfile.TarError, zlib.error, lzma.LZMAError, gzip.BadGzipFile)
_DAMAGES = (*_OF_READERS, EOFError, struct.error, ValueError, IndexError, OverflowError)
"""The errors of Python's readers of archives for damaged files."""


@dataclass(frozen=True)
class Location:
    """Where a file's bytes are: the file itself, or an archive and its name in there."""

    path: Path
    member: str = ""

    def __str__(self) -> str:
        return f"{self.path}:{self.member}" if self.member else str(self.path)


class FileTree:
    """The files below a folder and in the archives there, under one set of names.

    Archives are opened only when a file is asked for: prepared data needs none.

    `advice` is the remedy if a file is missing, for the end of an error.
    """

    def __init__(self, folder: Path, sources: Mapping[str, Path], advice: str = "") -> None:
        self.folder = folder
        self.sources = sources
        self.advice = advice

    @cached_property
    def locations(self) -> Mapping[str, Location]:
        """Where each file is, by its name relative to the folder or the archive."""
        locations: dict[str, Location] = {}
        for path in self.sources.values():
            if path.name.endswith(ARCHIVES):
                with unpacking(path):
                    locations |= {name: Location(path, name) for name, _ in _read_members(path)}
        return locations | {
            name: Location(path)
            for name, path in self.sources.items()
            if not path.name.endswith(ARCHIVES)
        }

    @cached_property
    def _by_last_part(self) -> Mapping[str, list[str]]:
        names: dict[str, list[str]] = {}
        for name in self.locations:
            names.setdefault(name.rpartition("/")[2], []).append(name)
        return names

    def find(self, suffix: str) -> str | None:
        """The name of the file that ends in these path parts; None when there is none.

        An unpacked file comes before one in an archive.
        """
        names = [
            name
            for name in self._by_last_part.get(suffix.rpartition("/")[2], [])
            if f"/{name}".endswith(f"/{suffix}")
        ]
        return min(names, key=lambda name: (bool(self.locations[name].member), name), default=None)

    def require(self, suffix: str) -> str:
        """The name of the file that ends in these path parts."""
        name = self.find(suffix)
        if name is None:
            raise DataError(
                f"{suffix} is neither in {self.folder} nor in an archive there{self.advice}"
            )
        return name

    def read(self, name: str) -> bytes:
        """A file's content; that of a compressed one when the name ends in ``.gz``."""
        return next(iter(self.read_all([name])))[1]

    def read_all(self, names: Iterable[str]) -> Iterator[tuple[str, bytes]]:
        """Files with their content, in the order in which they are stored."""
        by_archive: dict[Path, set[str]] = {}
        for name in names:
            location = self.locations[name]
            if location.member:
                by_archive.setdefault(location.path, set()).add(name)
            else:
                with unpacking(location.path):
                    yield name, _content(partial(open_regular, location.path), location)
        for path, wanted in by_archive.items():
            with unpacking(path):
                for name, opened in _read_members(path):
                    if name in wanted:
                        wanted.discard(name)
                        yield name, _content(opened, self.locations[name])
                    if not wanted:
                        break


def open_tree(folder: Path, advice: str = "") -> FileTree:
    """Lists the files of a folder."""
    if not folder.is_dir():
        raise DataError(f"folder {folder} does not exist")
    sources: dict[str, Path] = {}
    for where, _, names in os.walk(folder):
        below = Path(where).relative_to(folder).as_posix()
        prefix = "" if below == "." else f"{below}/"
        for name in names:
            if not is_unicode(prefix + name):
                raise DataError(
                    f"{folder}: the name of {printable(prefix + name)} is not UTF-8; rename it"
                )
            if not name.endswith(PARTIAL) and not name.startswith("."):
                sources[prefix + name] = Path(where, name)
    return FileTree(folder, dict(sorted(sources.items())), advice)


@contextlib.contextmanager
def unpacking(path: Path) -> Iterator[None]:
    """Turns errors of reading a file, which may be packed, into one line."""
    with explained(path, " cannot be read", "", DataError):
        try:
            yield
        except _DAMAGES as error:
            raise DataError(f"{path} is damaged or incomplete ({error}); fetch it again") from None
        except (NotImplementedError, RuntimeError) as error:
            # What zipfile says of encrypted members and of ways of packing it does not know.
            raise DataError(f"{path} cannot be unpacked here: {error}") from None
        except MemoryError:
            raise DataError(f"{path} does not fit into this machine's memory") from None


def _read_members(path: Path) -> Iterator[tuple[str, Callable[[], Any]]]:
    """An archive's plain files in stored order, to be opened; links and devices are passed over."""
    if path.suffix == ".zip":
        with open_regular(path) as file, zipfile.ZipFile(file) as packed:
            check_limit("members", len(packed.infolist()), path)
            for info in packed.infolist():
                if not info.is_dir():
                    yield _safe(path, info.filename), partial(packed.open, info)
        return
    with open_regular(path) as file, tarfile.open(fileobj=file) as archive:
        for number, member in enumerate(archive, start=1):
            check_limit("members", number, path)
            if member.isfile():
                name = _safe(path, member.name)
                # Already to pass over it, a compressed archive has to be unpacked.
                check_limit("file", member.size, Location(path, name))
                yield name, partial(archive.extractfile, member)


def _safe(path: Path, name: str) -> str:
    parts = PurePosixPath(name.replace("\\", "/"))
    if parts.is_absolute() or ".." in parts.parts:
        raise DataError(f"{path} contains '{name}', a path outside the archive; do not use it")
    return parts.as_posix()


def _content(opened: Callable[[], Any], where: Location) -> bytes:
    """A file's content, unpacked where its name ends in ``.gz``."""
    with opened() as file:
        if not str(where).endswith(".gz"):
            return read_limited(file, where)
        with gzip.GzipFile(fileobj=file) as unpacked:
            return read_limited(cast("BinaryIO", unpacked), where)
