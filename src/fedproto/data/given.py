"""A user's own data in memory: arrays, `torch` data sets, rows with named columns, own splits.

Rows are the form of the `datasets` library and of Flower Datasets; neither is needed here.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset

from fedproto.data.images import pixels
from fedproto.data.samples import DatasetSamples, MappedSamples, Samples, TensorSamples
from fedproto.errors import DataError
from fedproto.rng import Indices, Purpose, stream

ClientData: TypeAlias = "tuple[Any, Any] | Dataset[Any]"
"""One client's own data: inputs and labels as arrays, or a map-style `torch` data set."""

INPUTS = ("image", "img", "pixel_values", "input", "inputs", "x", "features")
TARGETS = ("label", "labels", "target", "targets", "fine_label", "class", "character", "y")
"""Names that columns of inputs and targets usually have."""

WHITE = 255


class Given:
    """The clients' data in one form, followed by their test data or one test set for all."""

    def __init__(
        self, clients: Sequence[Any], test: Any = None, columns: tuple[str, str] | None = None
    ) -> None:
        train = list(clients)
        if train and all(isinstance(client, Mapping) and "train" in client for client in train):
            if test is None and all("test" in client for client in train):
                test = [client["test"] for client in train]
            train = [client["train"] for client in train]
        each = isinstance(test, list) and not _gives_rows(test)
        if each and len(test) != len(train):
            raise DataError(f"{len(test)} parts of test data for {len(train)} clients")
        self.number = len(train)
        self.class_names: tuple[str, ...] = ()
        tests = [] if test is None else test if each else [test]
        self.shared = test is not None and not each
        self.parts: list[ClientData] = [self._plain(part, columns) for part in [*train, *tests]]

    def tests(self, parts: Sequence[Indices], seed: int) -> list[Indices] | None:
        """Each client's test samples; None where they are to be split off."""
        own = list(parts[self.number :])
        if not self.shared:
            return own or None
        return deal(own[0], self.number, seed)

    def _plain(self, part: Any, columns: tuple[str, str] | None) -> ClientData:
        """Rows as arrays; anything else as it is."""
        if not _gives_rows(part):
            return part  # type: ignore[no-any-return]
        first = part[0]
        names = columns or (_column(first, INPUTS, "inputs"), _column(first, TARGETS, "targets"))
        for name in names:
            if name not in first:
                raise DataError(f"there is no column '{name}'; there are {', '.join(first)}")
        described = getattr(part, "features", None)
        if isinstance(described, Mapping) and not self.class_names:
            self.class_names = tuple(getattr(described.get(names[1]), "names", None) or ())
        rows = [part[index] for index in range(len(part))]
        inputs = [_array(row[names[0]]) for row in rows]
        if len({array.shape for array in inputs}) > 1:
            raise DataError(
                f"the inputs in column '{names[0]}' have different shapes; bring them to one first"
            )
        return np.stack(inputs), np.array([row[names[1]] for row in rows])


def join_clients(clients: Sequence[ClientData]) -> tuple[Samples, list[Indices]]:
    """All clients' data as one set of samples, and each client's indices into it."""
    if not clients:
        raise DataError("a federation needs at least one client")
    datasets = [client for client in clients if isinstance(client, Dataset)]
    if datasets and len(datasets) < len(clients):
        raise DataError("give every client's data as arrays or every client's as torch data sets")
    arrays = [] if datasets else [_as_arrays(one, client) for client, one in enumerate(clients)]
    sizes: list[int] = [len(one) for one in datasets] or [len(inputs) for inputs, _ in arrays]  # type: ignore[arg-type]
    if 0 in sizes:
        raise DataError(f"client {sizes.index(0)} has no samples; leave it out")
    ends = np.cumsum(sizes, dtype=np.int64)
    parts = [np.arange(end - size, end) for size, end in zip(sizes, ends, strict=True)]
    if datasets:
        return DatasetSamples(ConcatDataset(datasets)), parts
    if len({inputs.shape[1:] for inputs, _ in arrays}) > 1:
        raise DataError("the clients' inputs have different shapes")
    inputs, labels = (_joined(list(part)) for part in zip(*arrays, strict=True))
    _check_finite(inputs, sizes)
    return TensorSamples(inputs, labels.long()), parts


def _as_arrays(given: Any, client: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """A client's inputs and labels as arrays."""
    try:
        inputs, labels = (
            part if isinstance(part, np.ndarray) else torch.as_tensor(part).detach().cpu().numpy()
            for part in given
        )
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(f"client {client}: expected (inputs, labels) as arrays: {error}") from None
    if not inputs.shape or not labels.shape:
        raise DataError(f"client {client}: expected (inputs, labels) as arrays, not single numbers")
    if len(inputs) != len(labels):
        raise DataError(f"client {client}: {len(inputs)} inputs but {len(labels)} labels")
    if labels.dtype.kind not in "iub":
        raise DataError(f"client {client}: labels must be integers, not {labels.dtype}")
    return inputs, labels


def _joined(parts: list[NDArray[Any]]) -> Tensor:
    try:
        return torch.from_numpy(np.concatenate(parts))
    except (TypeError, ValueError) as error:
        raise DataError(f"the clients' arrays do not fit together: {error}") from None


def _check_finite(inputs: Tensor, sizes: Sequence[int]) -> None:
    """Checks all clients' inputs at once."""
    if not inputs.is_floating_point():
        return
    wrong = ~torch.isfinite(inputs).reshape(len(inputs), -1).all(dim=1)
    if bool(wrong.any()):
        first = int(wrong.to(torch.uint8).argmax())
        client = int(np.searchsorted(np.cumsum(sizes), first, side="right"))
        raise DataError(f"client {client}: its inputs hold NaN or infinite numbers; remove them")


def deal(samples: Indices, clients: int, seed: int) -> list[Indices]:
    """Deals a test set for all out evenly among the clients."""
    shuffled = samples[stream(seed, Purpose.SPLIT).permutation(len(samples))]
    return [np.sort(part) for part in np.array_split(shuffled, clients)]


def scaled(
    samples: Samples, scale: bool | None, mean: Sequence[float] = (), std: Sequence[float] = ()
) -> Samples:
    """Samples divided by 255 if `scale` is set, or it is None and they are pictures of bytes."""
    if isinstance(samples, DatasetSamples):
        if mean or std:
            raise DataError("normalise in the data set itself; it gives samples one by one")
        first, _ = samples.dataset[0]
        divide = _is_to_divide(torch.as_tensor(first).unsqueeze(0), scale)
        return replace(samples, divisor=float(WHITE)) if divide else samples
    if not isinstance(samples, TensorSamples):
        return samples
    inputs, divide = samples.inputs, _is_to_divide(samples.inputs, scale)
    if inputs.dtype == torch.uint8 and not divide:
        inputs = inputs.float()
    elif inputs.dtype != torch.uint8 and divide:
        inputs = inputs / WHITE
    if inputs.dtype != torch.uint8 and not mean and not std:
        return TensorSamples(inputs, samples.targets)
    return MappedSamples(inputs, samples.targets, tuple(mean), tuple(std))


def _is_to_divide(inputs: Tensor, scale: bool | None) -> bool:
    if scale is not None:
        return scale
    picture = inputs.ndim == 4
    if picture and inputs.dtype == torch.uint8:
        warnings.warn(
            "the inputs are bytes: taken for pixels and divided by 255 (say scale=True, or"
            " scale=False to leave them as they are)",
            stacklevel=4,
        )
        return True
    some = inputs[:100]
    if picture and float(some.max()) > 1.5 and torch.equal(some, some.round().clamp(0, WHITE)):
        warnings.warn(
            "the inputs look like pixels from 0 to 255; scale=True would divide them by 255 (say"
            " scale=False if they are right as they are)",
            stacklevel=4,
        )
    return False


def _gives_rows(part: Any) -> bool:
    """Whether something gives rows with named columns."""
    try:
        return len(part) > 0 and isinstance(part[0], Mapping)
    except (TypeError, KeyError, IndexError):
        return False


def _column(row: Mapping[str, Any], usual: Iterable[str], what: str) -> str:
    found = [name for name in usual if name in row]
    if not found:
        raise DataError(
            f"which column holds the {what}? There are {', '.join(row)}: say columns=(inputs,"
            " targets)"
        )
    return found[0]


def _array(value: Any) -> NDArray[Any]:
    """One input; a picture as bytes ``[channels, H, W]``."""
    if hasattr(value, "convert"):  # a picture of Pillow's
        return pixels(value, 1 if value.mode in ("1", "L", "I", "F") else 3)
    array = np.asarray(value)
    if array.ndim == 2 and array.dtype == np.uint8:
        return array[None]
    channels_last = array.ndim == 3 and array.shape[-1] in (1, 3) and array.shape[0] not in (1, 3)
    return array.transpose(2, 0, 1) if channels_last else array
