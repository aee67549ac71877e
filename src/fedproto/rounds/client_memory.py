"""What clients keep between their own rounds, addressed by client and round.

A client's memory after a round is kept beside the one before, never in its place. Which of them is
valid is told by the run's records: the one of the last round in which the client's update was
accepted. So an update that was refused changes nothing, and a run that goes back to an earlier
round finds its clients as they were.
"""

from __future__ import annotations

from typing import Protocol

from fedproto.errors import StoreError
from fedproto.strategies.base import Declarations, initial_tensors
from fedproto.types import Tensors


class ClientMemory(Protocol):
    """Keeps tensors per client and round."""

    def load(self, client: int, round_: int) -> Tensors | None:
        """What a client kept after a round; None when there is nothing of that round."""
        ...

    def save(self, client: int, round_: int, tensors: Tensors, *, keep_from: int) -> None:
        """Keeps tensors, and forgets what nobody can ask for any more.

        Nobody can ask for what is older than `keep_from`, the earliest round to which the run may
        go back.
        """
        ...


def remembered(
    memory: ClientMemory, client: int, last_round: int | None, declared: Declarations
) -> Tensors | None:
    """A client's memory: initial before its first accepted update; None when it is lost."""
    if last_round is None or not declared:
        return initial_tensors(declared)
    kept = memory.load(client, last_round)
    if kept is not None:
        found = {name: (tuple(one.shape), one.dtype) for name, one in kept.items()}
        if found != {name: (one.shape, one.dtype) for name, one in declared.items()}:
            raise StoreError(
                f"client {client} holds other tensors of round {last_round} than the strategy keeps"
            )
    return kept


class MemoryInRAM:
    """For runs that are kept nowhere."""

    def __init__(self) -> None:
        self._kept: dict[int, tuple[int, Tensors]] = {}

    def load(self, client: int, round_: int) -> Tensors | None:
        """The client's newest; such a run never goes back."""
        kept_round, tensors = self._kept.get(client, (None, None))
        return tensors if kept_round == round_ else None

    def save(self, client: int, round_: int, tensors: Tensors, *, keep_from: int) -> None:
        """Keeps the newest alone."""
        del keep_from
        self._kept[client] = round_, tensors
