"""Fingerprints of what lies on disk, so that a flipped bit, a torn line or a careless edit shows.

They are checksums, not signatures: whoever can write a run directory can also compute them anew.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedproto.disk.files import content
from fedproto.errors import StoreError

HASH = "hash"
"""The key under which sealed JSON carries its fingerprint."""


class DamagedError(Exception):
    """Something that is not what its fingerprint says; turned into a message by who reads it."""


def fingerprint(data: bytes) -> str:
    """A fingerprint of bytes, in 32 letters."""
    return hashlib.sha256(data).hexdigest()[:32]


def tensors_fingerprint(tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> str:
    """A fingerprint of named tensors in memory of the CPU, and of their description."""
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


def unsealed(text: bytes) -> tuple[dict[str, Any], bool]:
    """The tables of JSON, compared with its fingerprint, and whether it carries one."""
    tables = read_json(text)
    if not isinstance(tables, dict):
        raise DamagedError("it holds no table")
    given = tables.pop(HASH, None)
    if given is not None and given != fingerprint(_text(tables)):
        raise DamagedError("it was changed after it was written")
    return tables, given is not None


def read_sealed(path: Path, remedy: str) -> dict[str, Any]:
    """The tables in a file of `sealed` ones; none where there is no file.

    Raises:
        StoreError: If it is damaged or carries no fingerprint; it says the remedy.
    """
    text = content(path)
    if not text:
        return {}
    try:
        return unsealed_line(text)
    except DamagedError as error:
        raise StoreError(f"{path} is damaged: {error}; {remedy}") from None


def read_json(text: bytes) -> Any:
    """JSON from outside, without the numbers that no JSON has."""
    try:
        if b"\\ud" in text.lower():  # halves of characters, which must come in pairs
            json.dumps(json.loads(text), ensure_ascii=False).encode()
        return json.loads(text, parse_constant=_no_number)
    # A RecursionError is what thousands of opening brackets give.
    except (ValueError, RecursionError) as error:
        raise DamagedError(f"it is not JSON: {error}") from None


def sealed_line(data: Mapping[str, Any]) -> bytes:
    """A table as a line of JSON that carries its own fingerprint."""
    plain = json.loads(json.dumps(data, allow_nan=False))
    return json.dumps({**plain, HASH: fingerprint(_text(plain))}).encode() + b"\n"


def unsealed_line(line: bytes, *, required: bool = True) -> dict[str, Any]:
    """The table of such a line, compared with its fingerprint."""
    data, marked = unsealed(line)
    if required and not marked:
        raise DamagedError("its fingerprint is missing")
    data.pop("chain", None)  # lines of earlier versions have one
    return data


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The tables in a file of such lines; none where there is no file.

    Raises:
        StoreError: If a line is damaged; a last one without its end is left out.
    """
    found = []
    for number, line in enumerate(content(path).split(b"\n")[:-1], start=1):
        try:
            found.append(unsealed_line(line))
        except DamagedError as error:
            raise StoreError(f"{path} line {number} is damaged: {error}") from None
    return found


def _text(data: Any) -> bytes:
    return json.dumps(data, sort_keys=True).encode()


def _no_number(text: str) -> float:
    raise ValueError(f"{text} is not a number in JSON")
