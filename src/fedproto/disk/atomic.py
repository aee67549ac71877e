"""Files that are there whole or not at all, and what to say when a disk fails."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from fedproto.errors import FedprotoError, StoreError


def write_atomically(path: Path, content: bytes) -> None:
    """Writes a file so that it is there whole or not at all, even if the machine stops."""
    partial = path.with_name(path.name + ".partial")
    try:
        with partial.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
        if os.name == "posix":  # elsewhere a directory cannot be opened to be synchronised
            directory = os.open(path.parent, os.O_RDONLY)
            try:
                os.fsync(directory)
            finally:
                os.close(directory)
    except OSError:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise


def append(path: Path, line: bytes) -> None:
    """Adds a line to a file and waits until it is on disk.

    Raises:
        StoreError: If it cannot be written; the file is then as it was before.
    """
    with explained(path), path.open("ab") as file:
        end = file.tell()
        try:
            file.write(line)
            file.flush()
            os.fsync(file.fileno())
        except OSError:
            with contextlib.suppress(OSError):
                file.truncate(end)
            raise


INTACT = (
    "; what was saved before is intact: free space or mend the permissions, then resume the run"
)


@contextlib.contextmanager
def explained(
    path: Path, what: str = "", remedy: str = INTACT, kind: type[FedprotoError] = StoreError
) -> Iterator[None]:
    """Turns a failing disk into a message that names file and remedy."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or error
        raise kind(f"{error.filename or path}{what}: {reason}{remedy}") from error


def is_there(path: Path) -> bool:
    """Whether a file is there; one that cannot be looked at is not taken for a missing one."""
    with explained(path):
        try:
            path.stat()
        except (FileNotFoundError, NotADirectoryError):
            return False
    return True


def content(path: Path) -> bytes:
    """What a file holds; nothing where there is none."""
    with explained(path):
        try:
            return path.read_bytes()
        except FileNotFoundError:
            return b""
