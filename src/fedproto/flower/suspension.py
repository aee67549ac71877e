"""Clients that fail again and again are left out for a while, and let back in.

A mute client costs a deadline whenever it is asked, and one whose updates are always refused costs
work for nothing. After some failures in a row, of whatever kind, a client is not asked for some
rounds; then it is tried again, and a single failure more suspends it for twice as long.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

from fedproto.config import FlowerOptions
from fedproto.disk.files import explained, is_there, write_atomically
from fedproto.disk.integrity import DamagedError, sealed, unsealed
from fedproto.errors import StoreError

SUSPENSIONS_FILE = "suspensions.json"


@dataclass
class _Conduct:
    failures: int = 0
    left: int = 0
    times: int = 0
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
        self._notices: list[str] = []

    def begin_round(self, round_: int) -> None:
        """A round begins: whoever is left out in it has one less before it."""
        self._round = round_
        self._out = {client for client, conduct in self._conduct.items() if conduct.left}
        for client in self._out:
            self._conduct[client].left -= 1

    def end_round(self) -> list[str]:
        """Keeps how things stand; who was suspended or let back in during the round."""
        tables = self._tables()
        if tables != self._kept:
            with explained(self._path):
                write_atomically(self._path, sealed(tables))
            self._kept = tables
        taken, self._notices = self._notices, []
        return taken

    def reason(self, client: int) -> str | None:
        """Why a client is not asked; None when it is."""
        conduct = self._conduct.get(client)
        if conduct is None or not (conduct.left or client in self._out):
            return None
        return (
            f"suspended until round {self._round + conduct.left + 2} after {conduct.failures}"
            f" failures, the last: {conduct.reason}"
        )

    def failed(self, client: int, reason: str, options: FlowerOptions) -> None:
        """A client gave no usable answer."""
        conduct = self._conduct.setdefault(client, _Conduct())
        conduct.failures += 1
        conduct.reason = reason
        if options.suspend_after and conduct.failures >= options.suspend_after:
            conduct.left = options.suspend_rounds * 2**conduct.times
            conduct.times += 1
            self._notices.append(f"client {client} is {self.reason(client)}")

    def answered(self, client: int) -> None:
        """A client gave a usable answer: its failures before are forgotten."""
        conduct = self._conduct.pop(client, None)
        if conduct is not None and conduct.times:
            self._notices.append(f"client {client} answers again and is no longer suspended")

    def _tables(self) -> dict[str, dict[str, int | str]]:
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
