"""Keeps memory that was freed, for the next job to use.

The C library gives large blocks back to the system as soon as they are freed, and the system clears
every page before it hands it out again: copying a model then costs five times the copying.
"""

from __future__ import annotations

import ctypes

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_LARGEST_BLOCK = 32 << 20
_KEPT = 512 << 20


def keep_freed_memory() -> None:
    """Has this process keep up to half a gigabyte; does nothing where the library is not GNU's."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return
    mallopt(_MMAP_THRESHOLD, _LARGEST_BLOCK)
    mallopt(_TRIM_THRESHOLD, _KEPT)
