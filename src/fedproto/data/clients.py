"""The clients of a federation in three arrays, so that a million of them take some megabytes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import overload

import numpy as np

from fedproto.rng import Indices


@dataclass(frozen=True, repr=False)
class Client:
    """One client's samples for training and for the test, as indices."""

    train: Indices
    test: Indices

    def __repr__(self) -> str:
        return f"Client({len(self.train):,} training samples, {len(self.test):,} test samples)"


class Clients(Sequence[Client]):
    """Clients by id; each is made when it is asked for, as a view.

    Args:
        samples: Indices of samples, client by client: first those for training, then those for the
            test.
        starts: Where each client's begin; one more for the end, ``[K + 1]``.
        cuts: Where each client's test part begins, ``[K]``.
    """

    def __init__(self, samples: Indices, starts: Indices, cuts: Indices) -> None:
        self._samples, self._starts, self._cuts = samples, starts, cuts

    @staticmethod
    def of(clients: Iterable[Client]) -> Clients:
        """Those of any sequence."""
        if isinstance(clients, Clients):
            return clients
        clients = list(clients)
        sizes = [(len(client.train), len(client.test)) for client in clients]
        parts = [part for client in clients for part in (client.train, client.test)]
        ends = np.cumsum([0, *(size for pair in sizes for size in pair)], dtype=np.int64)
        samples = np.concatenate([np.empty(0, dtype=np.int64), *parts])
        return Clients(samples.astype(np.int64), ends[::2], ends[1::2])

    def __len__(self) -> int:
        return len(self._cuts)

    def __repr__(self) -> str:
        return f"Clients({len(self):,})"

    @overload
    def __getitem__(self, client: int) -> Client: ...

    @overload
    def __getitem__(self, client: slice) -> Sequence[Client]: ...

    def __getitem__(self, client: int | slice) -> Client | Sequence[Client]:
        """A client, or some of them."""
        if isinstance(client, slice):
            return [self[one] for one in range(*client.indices(len(self)))]
        if not -len(self) <= client < len(self):
            raise IndexError(f"there is no client {client}")
        client %= len(self)
        cut = self._cuts[client]
        return Client(
            self._samples[self._starts[client] : cut], self._samples[cut : self._starts[client + 1]]
        )

    @cached_property
    def train_sizes(self) -> Indices:
        """Number of training samples per client."""
        return self._cuts - self._starts[:-1]

    @cached_property
    def test_sizes(self) -> Indices:
        """Number of test samples per client."""
        return self._starts[1:] - self._cuts

    @cached_property
    def train(self) -> Indices:
        """All clients' training samples, client by client."""
        return self._samples[self._in_training]

    @cached_property
    def test(self) -> Indices:
        """All clients' samples for the test."""
        return self._samples[~self._in_training]

    @property
    def _in_training(self) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        sizes = np.diff(self._starts)
        return np.arange(len(self._samples)) < np.repeat(self._cuts, sizes)
