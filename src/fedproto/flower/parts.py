"""Parts of messages: fields and tensors in Flower records, read only as they are expected."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from flwr.app import ArrayRecord, ConfigRecord, RecordDict

from fedproto.flower.arrays import UnreadableError, read_tensors
from fedproto.strategies.contract import Declarations
from fedproto.types import Tensors

PROTOCOL = 4
"""Changes whenever a reader of the version before could misread a message."""

LONGEST_TEXT = 100_000


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
