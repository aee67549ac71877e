"""Where samples come from: arrays in memory, or any `torch` data set read item by item."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset, default_collate

from fedproto.errors import DataError
from fedproto.rng import Indices

ClientData: TypeAlias = "tuple[Any, Any] | Dataset[Any]"
"""One client's own data: inputs and labels as arrays, or a map-style `torch` data set."""


class Samples(Protocol):
    """Inputs and targets by index; all an engine needs to know of a data set."""

    def __len__(self) -> int: ...

    def batch(self, indices: Indices) -> tuple[Tensor, Tensor]:
        """Inputs ``[B, ...]`` and targets of some samples."""
        ...

    def to(self, device: torch.device, dtype: torch.dtype) -> Samples:
        """The same samples with batches on a device, inputs in a floating type."""
        ...


@dataclass(frozen=True)
class TensorSamples:
    """Samples held in memory, or on the device once moved there.

    Attributes:
        inputs: ``[N, ...]``.
        targets: ``[N]``, or a label map per sample.
    """

    inputs: Tensor
    targets: Tensor

    def __len__(self) -> int:
        return len(self.inputs)

    def batch(self, indices: Indices) -> tuple[Tensor, Tensor]:
        """Gathers by index on the tensors' own device."""
        where = torch.from_numpy(indices).to(self.inputs.device)
        return self.inputs.index_select(0, where), self.targets.index_select(0, where)

    def to(self, device: torch.device, dtype: torch.dtype) -> TensorSamples:
        """Moves all samples at once."""
        return TensorSamples(self.inputs.to(device, dtype), self.targets.to(device))


@dataclass(frozen=True)
class DatasetSamples:
    """Samples of a map-style `torch` data set, fetched when asked for.

    Attributes:
        dataset: Gives ``(input, target)`` per index.
        device: Where batches go; None leaves them where they are.
        dtype: Floating type of the inputs.
    """

    dataset: Dataset[Any]
    device: torch.device | None = None
    dtype: torch.dtype = torch.float32

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]

    def batch(self, indices: Indices) -> tuple[Tensor, Tensor]:
        """Fetches item by item and stacks."""
        inputs, targets = default_collate([self.dataset[int(index)] for index in indices])
        return inputs.to(self.device, self.dtype), targets.to(self.device)

    def to(self, device: torch.device, dtype: torch.dtype) -> DatasetSamples:
        """Batches will go to that device."""
        return DatasetSamples(self.dataset, device, dtype)


def join_clients(clients: Sequence[ClientData]) -> tuple[Samples, list[Indices]]:
    """Puts the clients' own data behind one index.

    Args:
        clients: Each client's arrays, or each client's data set; one kind for all.

    Returns:
        The joint samples and each client's indices into them.

    Raises:
        DataError: If a client is empty or the parts do not fit together.
    """
    if not clients:
        raise DataError("a federation needs at least one client")
    datasets = [client for client in clients if isinstance(client, Dataset)]
    if datasets and len(datasets) < len(clients):
        raise DataError("give every client's data as arrays or every client's as torch data sets")
    if datasets:
        samples: Samples = DatasetSamples(ConcatDataset(datasets))
        sizes = [len(dataset) for dataset in datasets]  # type: ignore[arg-type]
    else:
        arrays = [_as_tensors(client, place) for place, client in enumerate(clients)]
        if len({inputs.shape[1:] for inputs, _ in arrays}) > 1:
            raise DataError("the clients' inputs have different shapes")
        samples = TensorSamples(
            torch.cat([inputs for inputs, _ in arrays]), torch.cat([labels for _, labels in arrays])
        )
        sizes = [len(inputs) for inputs, _ in arrays]
    for place, size in enumerate(sizes):
        if size == 0:
            raise DataError(f"client {place} has no samples; leave it out")
    ends = np.cumsum(sizes)
    return samples, [
        np.arange(end - size, end, dtype=np.int64) for size, end in zip(sizes, ends, strict=True)
    ]


def _as_tensors(client: Any, place: int) -> tuple[Tensor, Tensor]:
    try:
        inputs, labels = (torch.as_tensor(part) for part in client)
    except (TypeError, ValueError) as error:
        raise DataError(f"client {place}: expected (inputs, labels) as arrays: {error}") from None
    if len(inputs) != len(labels):
        raise DataError(f"client {place}: {len(inputs)} inputs but {len(labels)} labels")
    if labels.is_floating_point():
        raise DataError(f"client {place}: labels must be whole numbers, not {labels.dtype}")
    return inputs, labels.long()
