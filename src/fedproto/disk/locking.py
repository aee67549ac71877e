"""One process at a time in a directory: a lock that is there before anything else is."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

from fedproto.errors import StoreError

LOCK_FILE = ".lock"
"""Never replaced or removed, so that all processes lock the same file. Empty."""

_LOOK_AGAIN = 0.2
"""Seconds between two looks at a directory that another process uses."""


@contextlib.contextmanager
def locked(directory: Path, patience: float = 0.0) -> Iterator[None]:
    """Keeps other processes out of a directory; released even when this one is killed.

    Waits `patience` seconds for another process that is at it.
    """
    try:
        import fcntl
    except ImportError:  # not a POSIX system: no such locks
        yield
        return
    # Opened for writing, which network file systems ask for before they lock.
    with (directory / LOCK_FILE).open("ab") as file:
        until = time.monotonic() + patience
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= until:
                    raise StoreError(
                        f"{directory} is in use by another process; wait for it or stop it"
                    ) from None
            time.sleep(_LOOK_AGAIN)
        yield


def holds_nothing(directory: Path) -> bool:
    """Whether a directory is empty but for a lock and leftovers of broken writes."""
    return all(item.suffix == ".partial" or item.name == LOCK_FILE for item in directory.iterdir())
