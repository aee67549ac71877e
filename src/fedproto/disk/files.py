"""Atomic writes that follow no symbolic link; directories opened and locked.

A run directory may come from a stranger, and may be moved or replaced while a run writes to it. So
every write goes through a `Folder`: it opens the directory, walks to the file without following
links, and while it is locked writes to the directory that was opened, wherever its path leads now.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from io import BufferedReader
from pathlib import Path, PurePosixPath
from typing import BinaryIO, TypeVar, cast

from fedproto.errors import ConfigError, DataError, FedprotoError, StoreError, unknown_name

One = TypeVar("One")
Result = TypeVar("Result")

LOCK_FILE = ".lock"
"""Never replaced or removed, so that all processes lock the same file. Empty."""

PARTIAL = ".partial"
"""Suffix of files that are not complete yet."""

_POSIX = os.name == "posix"  # elsewhere directories cannot be opened
_DIRECTORY = getattr(os, "O_DIRECTORY", 0) | getattr(os, "O_CLOEXEC", 0)
_NO_LINK = getattr(os, "O_NOFOLLOW", 0)
# A pipe without a writer, or a terminal, must not block: it is refused once it is open.
_PLAIN = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
_LOOK_AGAIN = 0.2
"""Seconds between two checks of a directory that another process uses."""


class Folder:
    """A directory whose files are written atomically, without following links.

    Files are named relative to it, with slashes. Its own path may lead through links, because a
    user chose it; what is inside of it may not.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._locked: tuple[int, int] | None = None  # the directory and its lock

    def write(self, name: str, content: bytes) -> None:
        """Creates or replaces a file in one step, even if the machine stops; makes its folder."""
        with self._opened(name, make=True) as (at, last):
            partial = str(Path(last).with_name(f".{secrets.token_hex(8)}{PARTIAL}"))
            try:
                with open_plain(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, at) as file:
                    file.write(content)
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(partial, last, src_dir_fd=at, dst_dir_fd=at)
                if at is not None:
                    os.fsync(at)
            except OSError:
                with contextlib.suppress(OSError):
                    os.unlink(partial, dir_fd=at)
                raise

    def append(self, name: str, line: bytes) -> None:
        """Adds to a file and waits until it is on disk; a failure leaves the file as it was."""
        with (
            self._opened(name, make=True) as (at, last),
            open_plain(last, os.O_WRONLY | os.O_CREAT | os.O_APPEND, at) as file,
        ):
            end = file.seek(0, os.SEEK_END)
            try:
                file.write(line)
                file.flush()
                os.fsync(file.fileno())
            except OSError:
                with contextlib.suppress(OSError):
                    file.truncate(end)
                raise

    def make(self, name: str) -> Path:
        """A folder below that is not a link; made unless it is there."""
        with self._opened(f"{name}/-", make=True):
            return self.path / name

    def remove(self, name: str) -> None:
        """Removes a file; a link is removed itself."""
        with self._opened(name) as (at, last):
            os.unlink(last, dir_fd=at)

    def remove_leftovers(self) -> None:
        """Removes leftovers of interrupted writes, in the folders below too."""
        for leftover in self.path.rglob(f"*{PARTIAL}"):
            self.remove(leftover.relative_to(self.path).as_posix())

    def is_empty(self) -> bool:
        """Whether the directory is empty but for a lock and leftovers of interrupted writes."""
        found = self.path.iterdir()
        return all(item.suffix == PARTIAL or item.name == LOCK_FILE for item in found)

    @contextlib.contextmanager
    def made(self) -> Iterator[None]:
        """Makes the directory and locks it, also if another process makes it at this moment."""
        with explained(self.path, " cannot be made", "; choose another directory"):
            self.path.mkdir(parents=True, exist_ok=True)
        with explained(self.path), self.locked(patience=5.0):
            yield

    @contextlib.contextmanager
    def locked(self, patience: float = 0.0) -> Iterator[None]:
        """Locks the directory against other processes; released even by a kill.

        Waits `patience` seconds for another process that uses it. From now on a write raises a
        `StoreError` if the path leads to another directory, or the lock was removed.
        """
        with contextlib.ExitStack() as stack:
            with explained(self.path):
                directory = os.open(self.path, _DIRECTORY) if _POSIX else None
                if directory is not None:
                    stack.callback(os.close, directory)
                lock = stack.enter_context(locked(self.path / LOCK_FILE, patience, directory))
            if directory is not None:
                self._locked = directory, lock
                stack.callback(setattr, self, "_locked", None)
            self.check_in_place()
            yield

    def check_in_place(self) -> None:
        """Raises a `StoreError` if the locked directory was moved, deleted or replaced."""
        if self._locked is None:
            return
        directory, lock = self._locked
        try:
            named = os.stat(LOCK_FILE, dir_fd=directory, follow_symlinks=False)
            same = os.path.samestat(self.path.stat(), os.fstat(directory)) and os.path.samestat(
                named, os.fstat(lock)
            )
        except (FileNotFoundError, NotADirectoryError):
            same = False
        if not same:
            raise StoreError(
                f"{self.path} was moved, deleted or replaced during the run, or its {LOCK_FILE}"
                " was; the run has stopped and written nothing since. If you moved it, continue it"
                " there: fedproto resume"
            )

    @contextlib.contextmanager
    def _opened(self, name: str, *, make: bool = False) -> Iterator[tuple[int | None, str]]:
        """The folder that a file is in, opened, and the file's name there."""
        *folders, last = PurePosixPath(name).parts
        if not _POSIX:
            path = self.path.joinpath(*folders)
            if make:
                path.mkdir(parents=True, exist_ok=True)
            yield None, str(path / last)
            return
        self.check_in_place()
        where = self.path
        at = os.dup(self._locked[0]) if self._locked else os.open(where, _DIRECTORY)
        try:
            for folder in folders:
                where = where / folder
                if make:
                    with contextlib.suppress(FileExistsError):
                        os.mkdir(folder, dir_fd=at)
                above, at = at, os.open(folder, _DIRECTORY | _NO_LINK, dir_fd=at)
                os.close(above)
            where = where / last
            yield at, last
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENOTDIR):
                raise StoreError(
                    f"{where} is a symbolic link or of the wrong kind, and nothing is written"
                    " through it; remove it"
                ) from None
            error.filename, error.filename2 = str(where), None
            raise
        finally:
            os.close(at)


@contextlib.contextmanager
def locked(path: Path, patience: float, at: int | None = None) -> Iterator[int]:
    """Locks a file, made unless it is there; released even when this process is killed.

    Waits `patience` seconds for another process. `at` is the file's folder, if it is open.
    """
    # Opened for writing, which network file systems ask for before they lock.
    name = path if at is None else path.name
    with open_plain(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, at) as lock:
        until = time.monotonic() + patience
        while True:
            try:
                _lock(lock.fileno())
                break
            except BlockingIOError:
                if time.monotonic() >= until:
                    raise StoreError(
                        f"{path.parent} is in use by another process; wait for it or stop it"
                    ) from None
            time.sleep(_LOOK_AGAIN)
        yield lock.fileno()


def _lock(descriptor: int) -> None:
    """Locks an open file; raises a `BlockingIOError` while another process holds it."""
    if sys.platform == "win32":
        import msvcrt

        try:
            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
        except OSError as error:
            raise BlockingIOError(error.errno, error.strerror) from None
    else:
        import fcntl

        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def write_atomically(path: Path, content: bytes) -> None:
    """Writes a file atomically; a link in its place is replaced."""
    Folder(path.parent).write(path.name, content)


def write_output(path: Path, content: bytes) -> Path:
    """Writes a file that a user asked for, atomically, and makes the folder that it goes to.

    Raises:
        StoreError: If it cannot be written.
    """
    with explained(path, " cannot be written", "; choose another path"):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, content)
    return path


def open_regular(path: Path) -> BufferedReader:
    """Opens a file for reading; a pipe or a device, which may be endless, is refused."""
    return cast("BufferedReader", open_plain(path, os.O_RDONLY, follow=True))


def open_plain(
    path: str | Path, flags: int, at: int | None = None, *, follow: bool = False
) -> BinaryIO:
    """Opens a regular file, not a link, in an open folder or by its path."""
    descriptor = os.open(path, flags | _PLAIN | (0 if follow else _NO_LINK), 0o666, dir_fd=at)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    mode = "rb" if flags == os.O_RDONLY else "ab" if flags & os.O_APPEND else "wb"
    return cast("BinaryIO", os.fdopen(descriptor, mode))


def at_once(work: Callable[[One], Result], items: Iterable[One]) -> list[Result]:
    """The results of work on files, item by item, in several threads: a disk answers late."""
    with ThreadPoolExecutor(8) as pool:
        return list(pool.map(work, items))


INTACT = "; earlier rounds are intact: free space or correct the permissions, then resume the run"


@contextlib.contextmanager
def explained(
    path: Path, what: str = "", remedy: str = INTACT, kind: type[FedprotoError] = StoreError
) -> Iterator[None]:
    """Turns an error of the disk into a message with file and remedy."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or error
        raise kind(f"{error.filename or path}{what}: {reason}{remedy}") from error


def is_there(path: Path) -> bool:
    """Whether a file exists; an error other than its absence is raised."""
    with explained(path):
        try:
            path.stat()
        except (FileNotFoundError, NotADirectoryError):
            return False
    return True


def user_path(text: str, *roots: Path) -> Path | None:
    """The file of a path that a user wrote, from the current folder or below others.

    None if it does not exist or is not a valid path: too long, or of an unknown user.
    """
    try:
        given = Path(text).expanduser()
    except RuntimeError:  # an unknown user after ~
        return None
    for path in (given, *(root / given for root in roots)):
        with contextlib.suppress(OSError, ValueError):
            if path.exists():
                return path
    return None


def content(path: Path) -> bytes:
    """The content of a file; empty if there is none."""
    with explained(path):
        try:
            with open_regular(path) as file:
                return file.read()
        except FileNotFoundError:
            return b""


VARIABLE = "FEDPROTO_LIMITS"

LIMITS = {
    "file": 4 * 2**30,  # bytes of one file that is read at once, unpacked
    "members": 5_000_000,  # files in one archive
    "classes": 100_000,  # number of classes that labels may imply
    "runs": 10_000,  # runs of one sweep
    "pixels": 64_000_000,  # pixels of one image
}
"""The largest accepted sizes; the environment variable ``FEDPROTO_LIMITS`` raises them.

They protect the machine that reads: its owner sets them, no recipe or server can.
"""


def limits() -> dict[str, int]:
    """The limits on this machine."""
    return _parsed(os.environ.get(VARIABLE, ""))


def read_limited(file: BinaryIO, where: object) -> bytes:
    """The content of a file of unknown size, such as an unpacked one."""
    content = file.read(limits()["file"] + 1)
    check_limit("file", len(content), where)
    return content


def check_limit(name: str, value: int, where: object) -> None:
    """Raises an error above a limit."""
    most = limits()[name]
    if value > most:
        raise DataError(
            f"{where} is over the limit of {most:,} for '{name}'; to allow it, raise the limit:"
            f" FEDPROTO_LIMITS='{name}=…'"
        )


@lru_cache(maxsize=8)
def _parsed(text: str) -> dict[str, int]:
    given = dict(LIMITS)
    for each in text.split():
        name, _, value = each.partition("=")
        if name not in LIMITS:
            raise ConfigError(unknown_name("limit", name, LIMITS))
        try:
            given[name] = int(float(value))
        except (ValueError, OverflowError):
            raise ConfigError(
                f"limit '{each}': write it as name=number, such as file=1e9"
            ) from None
    return given
