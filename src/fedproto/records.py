"""Round records as lines of ``rounds.jsonl``, each linked to all before and checked when read."""

from __future__ import annotations

import math
import types
import typing
from pathlib import Path
from typing import Any, get_args, get_origin

from fedproto.errors import StoreError
from fedproto.integrity import Chain, DamagedError, read_json
from fedproto.types import RoundRecord

_BY_CLIENT = ("epochs", "attention", "failures")


class RecordReader:
    """Reads records in order, piece by piece.

    Args:
        path: The file, for messages.

    Attributes:
        count: Records read so far.
        chain: The links up to the last of them.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.count = 0
        self.chain = Chain()

    def read(self, content: bytes) -> list[RoundRecord]:
        """The records in whole lines; what follows the last line's end is left out.

        Raises:
            StoreError: If a line is damaged, out of order or does not follow those before it.
        """
        return [self._read(line) for line in content.split(b"\n")[:-1]]

    def _read(self, line: bytes) -> RoundRecord:
        where = f"{self.path} line {self.count + 1}"
        try:
            record = _record(self.chain.check(_table(read_json(line))))
        except DamagedError as error:
            raise StoreError(
                f"{where} is damaged: {error}; restore the file from a copy, or start the run again"
                " in another directory ('fedproto check' says what can be saved)"
            ) from None
        if record.round != self.count:
            raise StoreError(f"{where} is about round {record.round}, out of order")
        self.count += 1
        return record


def _table(data: Any) -> dict[str, Any]:
    if not isinstance(data, dict):
        raise DamagedError("it is no record")
    return data


def _record(data: dict[str, Any]) -> RoundRecord:
    hints = typing.get_type_hints(RoundRecord)
    try:
        for name in _BY_CLIENT:
            if name in data:
                data[name] = {int(client): value for client, value in data[name].items()}
        record = RoundRecord(**data)
    except (ValueError, TypeError, AttributeError) as error:
        raise DamagedError(f"it is no record: {error}") from None
    for name, hint in hints.items():
        if not _fits(getattr(record, name), hint):
            raise DamagedError(f"its {name} is of the wrong kind")
    return record


def _fits(value: Any, hint: Any) -> bool:
    """Whether a value read from JSON is what a field is declared to be."""
    origin, members = get_origin(hint), get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, member) for member in members)
    if origin is list:
        return isinstance(value, list) and all(_fits(each, members[0]) for each in value)
    if origin is dict:
        return isinstance(value, dict) and all(
            _fits(key, members[0]) and _fits(each, members[1]) for key, each in value.items()
        )
    if hint is float:
        return type(value) in (int, float) and _is_finite(value)
    return type(value) is hint


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number larger than any floating-point one
        return False
