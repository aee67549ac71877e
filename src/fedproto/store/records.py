"""Round records as lines of ``rounds.jsonl``, each with a fingerprint and checked when read."""

from __future__ import annotations

import math
import types
import typing
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, TypeAlias, get_args, get_origin

from fedproto.disk.integrity import DamagedError, unsealed_line
from fedproto.errors import StoreError
from fedproto.types import RoundRecord

Check: TypeAlias = Callable[[Collection[Any]], bool]
_BY_CLIENT = ("epochs", "attention", "failures")


class RecordReader:
    """Reads records in order, piece by piece.

    Those of version 0.1.0 had no fingerprints; only there may they be missing.
    """

    def __init__(self, path: Path, *, fingerprinted: bool = True) -> None:
        self.path = path
        self.count = 0
        self._fingerprinted = fingerprinted

    def read(self, content: bytes) -> list[RoundRecord]:
        """The records in whole lines; what follows the last line's end is left out."""
        return [self._read(line) for line in content.split(b"\n")[:-1]]

    def _read(self, line: bytes) -> RoundRecord:
        where = f"{self.path} line {self.count + 1}"
        try:
            record = _record(unsealed_line(line, required=self._fingerprinted))
        except DamagedError as error:
            raise StoreError(
                f"{where} is damaged: {error}; restore the file from a copy, or start the run again"
                " in another directory ('fedproto check' says what can be saved)"
            ) from None
        if record.round != self.count:
            raise StoreError(f"{where} is about round {record.round}, out of order")
        self.count += 1
        return record


def _record(data: dict[str, Any]) -> RoundRecord:
    try:
        for name in _BY_CLIENT:
            if name in data:
                data[name] = dict(zip(map(int, data[name]), data[name].values(), strict=True))
        record = RoundRecord(**data)
    except (ValueError, TypeError, AttributeError) as error:
        raise DamagedError(f"it is no record: {error}") from None
    for name, fit in _CHECKS.items():
        if not fit([getattr(record, name)]):
            raise DamagedError(f"its {name} is of the wrong kind")
    return record


def _check_of(hint: Any) -> Check:
    """Tells whether values read from JSON are what a field is declared to be.

    Many values are looked at together: a long run has millions of them.
    """
    origin, members = get_origin(hint), [_check_of(member) for member in get_args(hint)]
    if origin in (typing.Union, types.UnionType):
        return lambda values: all(any(fits([value]) for fits in members) for value in values)
    if origin is list:
        (fit,) = members
        return lambda values: _are(values, list) and all(map(fit, values))
    if origin is dict:
        keys_fit, fit = members
        return lambda values: (
            _are(values, dict)
            and all(keys_fit(each.keys()) and fit(each.values()) for each in values)
        )
    if hint is float:
        return lambda values: _are(values, int, float) and _are_finite(values)
    return lambda values: _are(values, hint)


def _are(values: Collection[Any], *kinds: type) -> bool:
    return set(map(type, values)).issubset(kinds)


def _are_finite(values: Collection[float]) -> bool:
    try:
        return all(map(math.isfinite, values))
    except OverflowError:  # a whole number larger than any floating-point one
        return False


_CHECKS = {name: _check_of(hint) for name, hint in typing.get_type_hints(RoundRecord).items()}
