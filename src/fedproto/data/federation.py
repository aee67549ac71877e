"""A federation: samples, and which of them each client holds for training and test."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from fedproto.data.samples import ClientData, Samples, TensorSamples, join_clients
from fedproto.errors import DataError
from fedproto.limits import check_limit
from fedproto.rng import Indices, Purpose, stream
from fedproto.types import POOLED, VOID


@dataclass(frozen=True)
class Client:
    """One client's samples, as indices.

    Attributes:
        train: What it trains on.
        test: What the aggregate model is tested on.
        validation: What was taken out of its samples for choosing among models.
    """

    train: Indices
    test: Indices
    validation: Indices = field(default_factory=lambda: np.empty(0, dtype=np.int64))


@dataclass(frozen=True)
class Federation:
    """Clients with their data.

    Attributes:
        name: What it is called in records.
        samples: The samples of all clients behind one index.
        clients: Each client's share, by client id.
        num_classes: Number of classes over all clients.
        input_shape: Shape of one input.
        task: Name of the task, as in `fedproto.tasks`.
        class_names: What the classes are called, in the order of their labels; may be empty.
        validation: Samples the server keeps for choosing among models; in no client's share.
        labels: The class of every sample where the targets are label maps: what it mainly shows,
            counted from 0 without the background. None where the targets say it.
    """

    name: str
    samples: Samples
    clients: tuple[Client, ...]
    num_classes: int
    input_shape: tuple[int, ...]
    task: str = "classification"
    validation: Indices = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    labels: Indices | None = None
    class_names: tuple[str, ...] = ()

    @property
    def train_sizes(self) -> Indices:
        """Number of training samples per client."""
        return np.array([len(client.train) for client in self.clients], dtype=np.int64)

    def train_indices(self, client: int) -> Indices:
        """A client's training samples; those of all clients for `POOLED`."""
        if client == POOLED:
            return np.concatenate([one.train for one in self.clients])
        return self.clients[client].train

    @property
    def test_indices(self) -> Indices:
        """The union of the clients' test parts."""
        return np.concatenate([client.test for client in self.clients])

    @staticmethod
    def from_clients(
        clients: Sequence[ClientData],
        *,
        num_classes: int | None = None,
        test_fraction: float = 0.2,
        seed: int = 0,
        name: str = "own data",
        task: str = "classification",
        class_names: Sequence[str] = (),
    ) -> Federation:
        """A federation of a user's own data, split into training and test per client.

        Args:
            clients: Per client ``(inputs, labels)`` as arrays or tensors, or a `torch` data set.
            num_classes: Number of classes; counted from the labels when not given.
            test_fraction: Share of every client that is kept for the test.
            seed: For the split.
            name: What to call it in records.
            task: ``classification``, or ``segmentation`` where the labels are label maps
                ``[N, H, W]`` with the background as class 0 and void as 255.
            class_names: What the classes are called.

        Raises:
            DataError: If a client is empty or its arrays do not fit together.
        """
        samples, parts = join_clients(clients)
        labels = (
            _labels(samples) if num_classes is None or isinstance(samples, TensorSamples) else None
        )
        if labels is not None and task == "segmentation":
            labels = labels[labels != VOID]
        if labels is not None:
            num_classes = _checked_num_classes(labels, num_classes)
        first, _ = samples.batch(np.zeros(1, dtype=np.int64))
        assert num_classes is not None  # noqa: S101 - narrows the type; set above when not given
        return Federation(
            name=name,
            samples=samples,
            clients=split_clients(parts, seed, test_fraction),
            num_classes=num_classes,
            input_shape=tuple(first.shape[1:]),
            task=task,
            class_names=tuple(class_names),
        )


def split_clients(
    parts: Sequence[Indices], seed: int, test_fraction: float = 0.2
) -> tuple[Client, ...]:
    """Splits every client's samples into training and test, once, from the seed.

    The training part is rounded down but never empty, so that a client of one sample trains on it
    and has nothing to test.

    Args:
        parts: Each client's samples.
        seed: For the shuffling before the cut.
        test_fraction: Share of the test part.

    Raises:
        DataError: If the fraction is not in [0, 1), or a client is empty.
    """
    if not 0 <= test_fraction < 1:
        raise DataError(f"test_fraction must be at least 0 and below 1, not {test_fraction}")
    clients = []
    for client, part in enumerate(parts):
        if len(part) == 0:
            raise DataError(f"client {client} has no samples; use fewer clients or more data")
        shuffled = part[stream(seed, Purpose.SPLIT, client).permutation(len(part))]
        cut = max(1, int((1 - test_fraction) * len(part) + 1e-9))
        clients.append(Client(np.sort(shuffled[:cut]), np.sort(shuffled[cut:])))
    return tuple(clients)


def hold_out(parts: Sequence[Indices], seed: int, fraction: float) -> tuple[list[Indices], Indices]:
    """Takes a share of every client's samples away for the server, once, from the seed.

    What is left to a client is rounded down but never empty: of ten samples and a fraction of 0.1
    it keeps nine, of nine it keeps eight.

    Args:
        parts: Each client's samples.
        seed: For the choice.
        fraction: Share to take away.

    Returns:
        Each client's remaining samples, and all that were taken away.
    """
    if fraction == 0:
        return list(parts), np.empty(0, dtype=np.int64)
    rng = stream(seed, Purpose.VALIDATION)
    kept, taken = [], []
    for part in parts:
        shuffled = part[rng.permutation(len(part))]
        cut = max(1, int((1 - fraction) * len(part) + 1e-9))
        kept.append(np.sort(shuffled[:cut]))
        taken.append(shuffled[cut:])
    return kept, np.sort(np.concatenate(taken))


def _labels(samples: Samples) -> torch.Tensor:
    if isinstance(samples, TensorSamples):
        return samples.targets
    return torch.cat([samples.batch(np.array([place]))[1] for place in range(len(samples))])


def _checked_num_classes(labels: torch.Tensor, num_classes: int | None) -> int:
    lowest, highest = int(labels.min()), int(labels.max())
    if lowest < 0 or (num_classes is not None and highest >= num_classes):
        wrong = lowest if lowest < 0 else highest
        raise DataError(
            f"label {wrong} is outside the classes 0 to {(num_classes or highest + 1) - 1}"
        )
    check_limit("classes", highest + 1, f"label {highest}")
    return highest + 1 if num_classes is None else num_classes
