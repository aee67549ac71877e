"""Parts of messages as Flower records: fields and tensors, read only as the reader expects them.

Flower's own format of arrays is kept (NumPy's ``.npy``), so other Flower code can read ours. Names,
types and shapes are compared with the expectation before anything is allocated, and nothing is
unpickled.
"""

from __future__ import annotations

import io
import tokenize
import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from torch import Tensor

from fedproto.errors import FedprotoError
from fedproto.strategies.base import Declarations
from fedproto.types import Tensors

PROTOCOL = 5
"""Changes whenever a reader of the version before could misread a message."""

LONGEST_TEXT = 100_000

NUMPY_FORMAT = "numpy.ndarray"
LONGEST_HEADER = 1024
LONGEST_REASON = 300


class UnreadableError(FedprotoError):
    """A message that is not what it should be, or a refusal: why, in one printable line."""

    def __init__(self, reason: str) -> None:
        super().__init__(one_line(reason))


def one_line(text: str) -> str:
    """A stranger's text, made fit for a record: one line, printable, not too long."""
    words = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return words if len(words) <= LONGEST_REASON else words[: LONGEST_REASON - 1] + "…"


def write_tensors(tensors: Tensors) -> ArrayRecord:
    """Named tensors as a record, rows first whatever their order in memory."""
    return ArrayRecord(
        {
            name: Array(np.ascontiguousarray(tensor.detach().cpu().numpy()).reshape(tensor.shape))
            for name, tensor in tensors.items()
        }
    )


def read_tensors(record: ArrayRecord, like: Tensors, kind: str) -> dict[str, Tensor]:
    """A record's tensors: the names, types, shapes and device of others, and no others."""
    _check_names(record, like, kind)
    return {
        name: read_tensor(record[name], wanted.dtype, tuple(wanted.shape), name).to(wanted.device)
        for name, wanted in like.items()
    }


def read_tensor(
    array: Array, dtype: torch.dtype, shape: tuple[int, ...] | None, name: str
) -> Tensor:
    """One tensor of a type and shape; None for a vector of any length."""
    wanted = torch.empty(0, dtype=dtype).numpy().dtype
    if array.stype != NUMPY_FORMAT or array.dtype != str(wanted):
        raise UnreadableError(f"tensor '{name}' has type {array.dtype[:30]!r}, not {wanted}")
    if shape is not None and tuple(array.shape) != shape:
        raise UnreadableError(f"tensor '{name}' has shape {tuple(array.shape)}, not {shape}")
    file = io.BytesIO(array.data)
    found, rows_first, found_dtype = _read_header(file, name)
    if found_dtype != wanted or found != tuple(array.shape) or not rows_first:
        raise UnreadableError(f"tensor '{name}' is not what its description says")
    if shape is None and len(found) != 1:
        raise UnreadableError(f"tensor '{name}' is no vector")
    body = array.data[file.tell() :]
    if len(body) != wanted.itemsize * int(np.prod(found, dtype=object)):
        raise UnreadableError(f"tensor '{name}' has {len(body)} bytes, not what its shape needs")
    # A copy, because PyTorch wants memory that it may write to.
    return torch.from_numpy(np.frombuffer(body, dtype=wanted).reshape(found).copy())


def _check_names(record: Mapping[str, Array], like: Tensors, kind: str) -> None:
    odd = sorted(record.keys() ^ like.keys())
    if odd:
        fault = "is missing" if odd[0] in like else "is unknown"
        raise UnreadableError(f"{kind} '{odd[0][:100]}' {fault}")


def _read_header(file: io.BytesIO, name: str) -> tuple[tuple[int, ...], bool, np.dtype[np.generic]]:
    try:
        if np.lib.format.read_magic(file) != (1, 0):
            raise UnreadableError(f"tensor '{name}' is in a format that this side does not read")
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            shape, columns_first, dtype = np.lib.format.read_array_header_1_0(
                file, max_header_size=LONGEST_HEADER
            )
    except (
        ValueError,
        TypeError,
        SyntaxError,
        EOFError,
        RecursionError,
        MemoryError,
        tokenize.TokenError,
        UserWarning,
    ):
        raise UnreadableError(f"tensor '{name}' is no array") from None
    rows_first = not columns_first
    return tuple(int(side) for side in shape), rows_first, dtype


def about(fields: Mapping[str, Any]) -> ConfigRecord:
    """Fields as a record that names the protocol's version."""
    return ConfigRecord({"protocol": PROTOCOL, **fields})


def expect_fields(
    content: RecordDict,
    name: str,
    wanted: Mapping[str, type],
    *,
    optional: Mapping[str, type] | None = None,
    beside: tuple[str, ...] = (),
) -> dict[str, Any]:
    """The fields of a message's `ConfigRecord`, all of the right type and none too many.

    Fields of `optional` may be missing; the message may have other records beside.
    """
    for other in content:
        if other != name and other not in beside:
            raise UnreadableError(f"the message has an unexpected part '{other}'")
    record = content.get(name)
    if not isinstance(record, ConfigRecord):
        raise UnreadableError(f"the message has no part '{name}'")
    fields = dict(record)
    version = fields.pop("protocol", None)
    if type(version) is not int or version != PROTOCOL:
        raise UnreadableError(
            f"the message is of protocol {version!r}; this side speaks {PROTOCOL}"
        )
    known = {**wanted, **(optional or {})}
    for field, value in fields.items():
        _check_field(f"{name} field '{field}'", value, known.get(field))
    for field in wanted:
        if field not in fields:
            raise UnreadableError(f"{name} has no field '{field}'")
    return fields


def _check_field(what: str, value: object, wanted: type | None) -> None:
    if wanted is None:
        raise UnreadableError(f"{what} is unknown")
    if type(value) is not wanted:
        raise UnreadableError(f"{what} is not of type {wanted.__name__}")
    if isinstance(value, str) and len(value) > LONGEST_TEXT:
        raise UnreadableError(f"{what} is too long")


def expect_arrays(content: RecordDict, name: str) -> ArrayRecord:
    """A message's tensors of a name."""
    record = content.get(name)
    if not isinstance(record, ArrayRecord):
        raise UnreadableError(f"the message has no tensors '{name}'")
    return record


def expect_declared(content: RecordDict, name: str, declared: Declarations) -> Tensors:
    """A message's tensors that a strategy declared; none where it declared none."""
    if not declared and name not in content:
        return {}
    like = {key: torch.empty(one.shape, dtype=one.dtype) for key, one in declared.items()}
    return read_tensors(expect_arrays(content, name), like, name)
