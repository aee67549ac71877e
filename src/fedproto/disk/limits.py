"""Limits on what files from outside may make this machine unpack, parse and allocate.

They protect the machine that reads, so it is its owner who sets them, by ``fedproto --limit`` or
the environment variable ``FEDPROTO_LIMITS``; no recipe and no server can lift them.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import BinaryIO

from fedproto.errors import ConfigError, DataError
from fedproto.options import Options, option, read_options

VARIABLE = "FEDPROTO_LIMITS"


@dataclass(frozen=True)
class Limits(Options):
    """The largest that is believed."""

    file: int = option(
        4 * 2**30, "bytes of one file, unpacked, that is read as a whole", at_least=1
    )
    members: int = option(5_000_000, "files in one archive", at_least=1)
    classes: int = option(100_000, "classes that labels may ask for", at_least=1)
    runs: int = option(10_000, "runs of one sweep", at_least=1)
    pixels: int = option(64_000_000, "pixels of one picture", at_least=1)


def limits() -> Limits:
    """The limits on this machine."""
    return _parsed(os.environ.get(VARIABLE, ""))


def read_limited(file: BinaryIO, where: object) -> bytes:
    """The whole of a file that may be larger than it looks, such as an unpacked one."""
    most = limits().file
    content = file.read(most + 1)
    check_limit("file", len(content), where)
    return content


def check_limit(name: str, value: int, where: object) -> None:
    """Refuses what is over a limit."""
    most = getattr(limits(), name)
    if value > most:
        raise DataError(
            f"{where} is over the limit of {most:,} for '{name}'; if that is what it should be,"
            f" raise it: fedproto --limit {name}=…"
        )


@lru_cache(maxsize=8)
def _parsed(text: str) -> Limits:
    return read_options(Limits, dict(_pairs(text.split())), "limit")


def _pairs(texts: Iterable[str]) -> Iterable[tuple[str, int]]:
    for text in texts:
        name, _, value = text.partition("=")
        try:
            yield name, int(float(value))
        except (ValueError, OverflowError):
            raise ConfigError(
                f"limit '{text}': write it as name=number, such as file=1e9"
            ) from None
