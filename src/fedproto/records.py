"""Round records as lines of ``rounds.jsonl``, each linked to all before and checked when read."""

from __future__ import annotations

import math
import types
import typing
from collections.abc import Collection
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
    try:
        for name in _BY_CLIENT:
            if name in data:
                data[name] = dict(zip(map(int, data[name]), data[name].values(), strict=True))
        record = RoundRecord(**data)
    except (ValueError, TypeError, AttributeError) as error:
        raise DamagedError(f"it is no record: {error}") from None
    for name, hint in _FIELDS.items():
        if not _fit([getattr(record, name)], hint):
            raise DamagedError(f"its {name} is of the wrong kind")
    return record


def _fit(values: Collection[Any], hint: Any) -> bool:
    """Whether values read from JSON are what a field is declared to be.

    Many values are looked at together: a long run has millions of them.
    """
    kinds, origin, members = set(map(type, values)), get_origin(hint), get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return all(any(_fit([value], member) for member in members) for value in values)
    if origin is list:
        return kinds <= {list} and all(_fit(each, members[0]) for each in values)
    if origin is dict:
        return kinds <= {dict} and all(
            _fit(each.keys(), members[0]) and _fit(each.values(), members[1]) for each in values
        )
    if hint is float:
        return kinds <= {int, float} and _are_finite(values)
    return kinds <= {hint}


def _are_finite(values: Collection[float]) -> bool:
    try:
        return all(map(math.isfinite, values))
    except OverflowError:  # a whole number larger than any floating-point one
        return False


_FIELDS = typing.get_type_hints(RoundRecord)
