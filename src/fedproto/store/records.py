"""Round records as lines of ``rounds.jsonl``, each with a fingerprint and checked when read."""

from __future__ import annotations

import types
import typing
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any, get_args, get_origin

from fedproto.disk.integrity import DamagedError, unsealed
from fedproto.errors import StoreError
from fedproto.types import RoundRecord


def read_records(
    content: bytes, path: Path, *, fingerprinted: bool = True
) -> Iterator[RoundRecord]:
    """The records in whole lines; what follows the last line's end is left out.

    Records of version 0.1.0 had no fingerprints; only there may they be missing.
    """
    for number, line in enumerate(content.split(b"\n")[:-1]):
        where = f"{path} line {number + 1}"
        try:
            record = _record(unsealed(line, required=fingerprinted))
        except DamagedError as error:
            raise StoreError(
                f"{where} is damaged: {error}; restore the file from a copy, or start again in"
                " another directory ('fedproto check' says what can be saved)"
            ) from None
        if record.round != number:
            raise StoreError(f"{where} is about round {record.round}, out of order")
        yield record


def _record(data: dict[str, Any]) -> RoundRecord:
    data.pop("chain", None)  # lines of earlier versions have one
    try:
        for name in {"epochs", "attention", "failures"} & data.keys():
            data[name] = {int(client): value for client, value in data[name].items()}
        record = RoundRecord(**data)
    except (ValueError, TypeError, AttributeError) as error:
        raise DamagedError(f"it is not a record: {error}") from None
    for name, fit in _CHECKS.items():
        if not fit([getattr(record, name)]):
            raise DamagedError(f"its {name} has the wrong type")
    return record


def _check_of(hint: Any) -> Callable[[Collection[Any]], bool]:
    """Whether values from JSON have the declared type of a field.

    Many values are checked together: a long run has millions of them.
    """
    origin, members = get_origin(hint), [_check_of(member) for member in get_args(hint)]
    if origin in (typing.Union, types.UnionType):
        return lambda values: all(any(fits([value]) for fits in members) for value in values)
    if origin is list:
        return lambda values: _are(values, list) and all(map(members[0], values))
    if origin is dict:
        return lambda values: (
            _are(values, dict)
            and all(members[0](one.keys()) and members[1](one.values()) for one in values)
        )
    if hint is float:  # numbers whose sum could overflow are refused
        return lambda values: _are(values, int, float) and all(abs(one) < 1e300 for one in values)
    if hint is int:
        return lambda values: _are(values, int) and all(abs(one) < 2**63 for one in values)
    return lambda values: _are(values, hint)


def _are(values: Collection[Any], *kinds: type) -> bool:
    return set(map(type, values)).issubset(kinds)


_CHECKS = {name: _check_of(hint) for name, hint in typing.get_type_hints(RoundRecord).items()}
