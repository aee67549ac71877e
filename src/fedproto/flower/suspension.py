"""Clients that fail again and again are left out for a while, and let back in.

A mute client costs a deadline whenever it is asked. After some failures in a row it is not asked
for some rounds; then it is tried again, and a single failure more suspends it for twice as long.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class _Conduct:
    failures: int = 0
    until: int = 0
    times: int = 0
    reason: str = ""


class Suspensions:
    """Who is left out until when.

    Args:
        after: Failures in a row that suspend a client; 0 for never.
        rounds: How many rounds it is left out the first time.
    """

    def __init__(self, after: int, rounds: int) -> None:
        self._after = after
        self._rounds = rounds
        self._conduct: dict[int, _Conduct] = {}
        self._notices: list[str] = []

    def take_notices(self) -> list[str]:
        """Who was suspended or let back in since the last call."""
        taken, self._notices = self._notices, []
        return taken

    def reason(self, client: int, round_: int) -> str | None:
        """Why a client is not asked in a round; None when it is."""
        conduct = self._conduct.get(client)
        if conduct is None or round_ >= conduct.until:
            return None
        return (
            f"suspended until round {conduct.until + 1} after {conduct.failures} failures,"
            f" the last: {conduct.reason}"
        )

    def failed(self, client: int, round_: int, reason: str) -> None:
        """A client gave no usable answer in a round."""
        conduct = self._conduct.setdefault(client, _Conduct())
        conduct.failures += 1
        conduct.reason = reason
        if self._after and conduct.failures >= self._after:
            conduct.until = round_ + 1 + self._rounds * 2**conduct.times
            conduct.times += 1
            self._notices.append(f"client {client} is {self.reason(client, round_ + 1)}")

    def answered(self, client: int) -> None:
        """A client gave a usable answer: its failures before are forgotten."""
        conduct = self._conduct.pop(client, None)
        if conduct is not None and conduct.times:
            self._notices.append(f"client {client} answers again and is no longer suspended")
