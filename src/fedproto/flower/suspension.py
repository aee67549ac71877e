"""Clients that fail too often are left out for a while, and let back in.

A mute client costs a deadline whenever it is asked, and one whose updates are always refused costs
work for nothing. Kept are the outcomes of the last rounds in which a client was asked to train, and
of those in which it was asked to test. With too many failures among either, of whatever kind, it is
not asked for some rounds. Then it is tried again; while those failures are among its last outcomes,
a single one more suspends it for twice as long.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fedproto.config import FlowerOptions
from fedproto.disk.files import explained, is_there, write_atomically
from fedproto.disk.integrity import DamagedError, sealed, unsealed
from fedproto.errors import StoreError

SUSPENSIONS_FILE = "suspensions.json"


@dataclass
class _Conduct:
    """A client's.

    Attributes:
        failed: Whether it failed, in its last rounds, by the kind of question.
        left: Rounds that it is still left out.
        times: How often it was suspended since it last had a clean record.
        back: Whether it has answered since.
    """

    failed: dict[str, list[bool]] = field(default_factory=dict)
    left: int = 0
    times: int = 0
    back: bool = True
    reason: str = ""


class Suspensions:
    """Who is left out for how many rounds more.

    Kept in a file, so that a server that starts again goes on with it.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / SUSPENSIONS_FILE
        self._conduct = _read(self._path)
        self._kept = self._tables()
        self._round = 0
        self._out: set[int] = set()
        self._outcomes: dict[int, dict[str, str | None]] = defaultdict(dict)

    def begin_round(self, round_: int) -> None:
        """A round begins: whoever is left out in it has one less before it."""
        self._round = round_
        self._out = {client for client, conduct in self._conduct.items() if conduct.left}
        for client in self._out:
            self._conduct[client].left -= 1

    def failed(self, client: int, kind: str, reason: str) -> None:
        """A client gave no usable answer to a question of a kind."""
        self._outcomes[client][kind] = reason

    def answered(self, client: int, kind: str) -> None:
        """A client gave a usable answer; an unusable one in the same round counts for more."""
        self._outcomes[client].setdefault(kind, None)

    def is_asked(self, client: int) -> bool:
        """Whether a client is worth a deadline: not left out, and no failure yet in this round."""
        return not (self.reason(client) or any(self._outcomes.get(client, {}).values()))

    def end_round(self, options: FlowerOptions) -> list[str]:
        """Judges and keeps the outcomes of the round; who is suspended now, or let back in."""
        judged = [self._judge(client, options) for client in sorted(self._outcomes)]
        self._outcomes.clear()
        tables = self._tables()
        if tables != self._kept:
            with explained(self._path):
                write_atomically(self._path, sealed(tables))
            self._kept = tables
        return [notice for notice in judged if notice is not None]

    def reason(self, client: int) -> str | None:
        """Why a client is not asked; None when it is."""
        conduct = self._conduct.get(client)
        if conduct is None or not (conduct.left or client in self._out):
            return None
        return f"suspended until round {self._round + conduct.left + 2}: {conduct.reason}"

    def _judge(self, client: int, options: FlowerOptions) -> str | None:
        conduct = self._conduct.setdefault(client, _Conduct())
        outcomes = self._outcomes[client]
        suspended = False
        for kind, reason in outcomes.items():
            last = [*conduct.failed.get(kind, []), reason is not None][-options.suspend_window :]
            conduct.failed[kind] = last
            if reason is not None and 0 < options.suspend_after <= sum(last):
                suspended = True
                conduct.reason = (
                    f"{sum(last)} of its last {len(last)} answers ({kind}) were not usable, the"
                    f" last: {reason}"
                )
        if suspended:
            conduct.left = options.suspend_rounds * 2**conduct.times
            conduct.times += 1
            conduct.back = False
            return f"client {client} is {self.reason(client)}"
        if not any(map(any, conduct.failed.values())):
            del self._conduct[client]
        if conduct.back or any(outcomes.values()):
            return None
        conduct.back = True
        return f"client {client} answers again and is no longer suspended"

    def _tables(self) -> dict[str, dict[str, Any]]:
        return {str(client): asdict(conduct) for client, conduct in self._conduct.items()}


def _read(path: Path) -> dict[int, _Conduct]:
    if not is_there(path):
        return {}
    try:
        with explained(path):
            tables, marked = unsealed(path.read_bytes())
        if not marked:
            raise DamagedError("its fingerprint is missing")
        return {int(client): _Conduct(**table) for client, table in tables.items()}
    except (DamagedError, ValueError, TypeError) as error:
        raise StoreError(
            f"{path} is damaged: {error}; delete it, and no client is suspended"
        ) from None
