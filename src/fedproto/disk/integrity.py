"""Fingerprints of what lies on disk, so that a flipped bit or an edited number shows.

They are not signatures: whoever can write a run directory can also compute them anew. They tell a
damaged or carelessly edited file from a whole one, and records that belong to a checkpoint from
others.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedproto.disk.atomic import explained, is_there
from fedproto.errors import StoreError

HASH = "hash"
"""The key under which sealed JSON carries its fingerprint."""

UNTIMED = ("seconds",)
"""What may differ between two equal runs, and is no part of their chain."""


class DamagedError(Exception):
    """Something that is not what its fingerprint says; turned into a message by who reads it."""


def fingerprint(content: bytes) -> str:
    """A fingerprint of bytes, in 32 letters."""
    return hashlib.sha256(content).hexdigest()[:32]


def tensors_fingerprint(tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> str:
    """A fingerprint of named tensors in memory of the CPU, and of what is said about them."""
    digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode())
    for name in sorted(tensors):
        tensor = tensors[name].contiguous()
        digest.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()[:32]


def sealed(tables: Mapping[str, Any]) -> bytes:
    """Tables as JSON that carries its own fingerprint."""
    tables = json.loads(json.dumps(tables))
    whole = {**tables, HASH: fingerprint(_text(tables))}
    return json.dumps(whole, indent=2).encode() + b"\n"


def unsealed(content: bytes) -> tuple[dict[str, Any], bool]:
    """The tables of JSON, compared with its fingerprint, and whether it carries one."""
    tables = read_json(content)
    if not isinstance(tables, dict):
        raise DamagedError("it holds no tables")
    given = tables.pop(HASH, None)
    if given is not None and given != fingerprint(_text(tables)):
        raise DamagedError("it was changed after it was written")
    return tables, given is not None


def read_json(content: bytes) -> Any:
    """JSON from outside, without the numbers that no JSON has."""
    try:
        return json.loads(content, parse_constant=_no_number)
    # A RecursionError is what thousands of opening brackets give.
    except (ValueError, RecursionError) as error:
        raise DamagedError(f"it is no JSON: {error}") from None


class Chain:
    """Links lines of JSON, each to all before it.

    The links leave out how long things took, so that equal runs have equal chains; a line's own
    fingerprint covers that as well.

    Attributes:
        begun: Whether a line had a link: once one has, all must.
    """

    def __init__(self) -> None:
        self.head = ""
        self.begun = False

    def add(self, data: Mapping[str, Any]) -> bytes:
        """The next line, with its link and fingerprint."""
        plain = json.loads(json.dumps(data, allow_nan=False))
        self._link(plain)
        linked = {**plain, "chain": self.head}
        return json.dumps({**linked, HASH: fingerprint(_text(linked))}).encode() + b"\n"

    def check(self, data: dict[str, Any]) -> dict[str, Any]:
        """A line's own data, after comparing it with its fingerprint and its link."""
        given, link = data.pop(HASH, None), data.get("chain")
        if given is not None and given != fingerprint(_text(data)):
            raise DamagedError("it was changed after it was written")
        data.pop("chain", None)
        begun = self.begun
        self._link(data)
        self.begun = begun or link is not None
        if (link is not None and link != self.head) or (begun and None in (given, link)):
            raise DamagedError("it does not follow the lines before it")
        return data

    def _link(self, data: Mapping[str, Any]) -> None:
        kept = {name: value for name, value in data.items() if name not in UNTIMED}
        self.head = fingerprint(self.head.encode() + _text(kept))
        self.begun = True


def read_linked(path: Path, chain: Chain | None = None) -> Iterator[dict[str, Any]]:
    """The data of a file of linked lines; none where there is no file.

    Raises:
        StoreError: If a line was changed or is missing.
    """
    chain = chain or Chain()
    with explained(path):
        content = path.read_bytes() if is_there(path) else b""
    for number, line in enumerate(content.split(b"\n")[:-1], start=1):
        try:
            data = read_json(line)
            if not isinstance(data, dict):
                raise DamagedError("it is no table")
            yield chain.check(data)
        except DamagedError as error:
            raise StoreError(f"{path} line {number} is damaged: {error}") from None


def _text(data: Any) -> bytes:
    return json.dumps(data, sort_keys=True).encode()


def _no_number(text: str) -> float:
    raise ValueError(f"{text} is no number of JSON")
