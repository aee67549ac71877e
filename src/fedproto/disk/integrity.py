"""Fingerprints of files, which reveal a flipped bit, a torn line or an edit.

They are checksums, not signatures: whoever can write a run directory can also recompute them.
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
    """Content that does not match its fingerprint; readers turn it into a message."""


def tensors_fingerprint(tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> str:
    """A fingerprint of named tensors in memory of the CPU, and of their description."""
    digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode())
    for name in sorted(tensors):
        tensor = tensors[name].contiguous()
        digest.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()[:32]


def sealed(tables: Mapping[str, Any], indent: int | None = 2) -> bytes:
    """Tables as JSON that carries its own fingerprint; one line without `indent`."""
    plain = json.loads(json.dumps(tables, allow_nan=False))
    return json.dumps({**plain, HASH: _fingerprint(plain)}, indent=indent).encode() + b"\n"


def unsealed(text: bytes, *, required: bool = True) -> dict[str, Any]:
    """The tables of JSON, compared with its fingerprint.

    Files of format 1 had none; only there may it be missing.
    """
    tables = read_json(text)
    if not isinstance(tables, dict):
        raise DamagedError("it is not a JSON object")
    given = tables.pop(HASH, None)
    if given is None and required and tables.get("format") != 1:
        raise DamagedError("its fingerprint is missing")
    if given is not None and given != _fingerprint(tables):
        raise DamagedError("it was changed after it was written")
    return tables


def read_sealed(path: Path, remedy: str) -> dict[str, Any]:
    """The tables in a file of `sealed` ones; none where there is no file."""
    text = content(path)
    try:
        return unsealed(text) if text else {}
    except DamagedError as error:
        raise StoreError(f"{path} is damaged: {error}; {remedy}") from None


def read_json(text: bytes) -> Any:
    """Untrusted JSON, without NaN and infinite numbers."""
    try:
        if b"\\ud" in text.lower():  # halves of characters, which must come in pairs
            json.dumps(json.loads(text), ensure_ascii=False).encode()
        return json.loads(text, parse_constant=_no_number)
    # A RecursionError is what thousands of opening brackets give.
    except (ValueError, RecursionError) as error:
        raise DamagedError(f"it is not JSON: {error}") from None


def _fingerprint(data: Any) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:32]


def _no_number(text: str) -> float:
    raise ValueError(f"{text} is not a number in JSON")
