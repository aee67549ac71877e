"""A user's own data in memory: arrays, `torch` data sets, rows with named columns, own splits.

Rows are the form of the `datasets` library and of Flower Datasets; neither is needed here.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset, default_collate

from fedproto.data.images import pixels
from fedproto.data.samples import WHITE, MappedSamples, Samples, TensorSamples
from fedproto.errors import DataError
from fedproto.rng import Indices, Purpose, stream

Pair: TypeAlias = tuple[NDArray[Any], NDArray[Any]]
"""Inputs ``[N, ...]`` and their labels ``[N, ...]``."""

INPUTS = ("image", "img", "pixel_values", "input", "inputs", "x", "features")
TARGETS = ("label", "labels", "target", "targets", "fine_label", "class", "character", "y")
"""Names that columns of inputs and targets usually have."""


class Given:
    """The clients' data as one set of samples.

    Attributes:
        samples: Those of all clients, followed by their test data or one test set for all.
        train: Each client's samples, as indices.
        tests: Each client's test data; one part where all share it, none where it is split off.
        shared: Whether there is one test set for all.
        class_names: The names of the classes, where rows have them.
    """

    def __init__(
        self, clients: Sequence[Any], test: Any = None, columns: tuple[str, str] | None = None
    ) -> None:
        train = list(clients)
        if not train:
            raise DataError("a federation needs at least one client")
        if all(isinstance(client, Mapping) and "train" in client for client in train):
            if test is None and all("test" in client for client in train):
                test = [client["test"] for client in train]
            train = [client["train"] for client in train]
        each = isinstance(test, list) and not _gives_rows(test)
        if each and len(test) != len(train):
            raise DataError(f"test data of {len(test)} clients for {len(train)} clients")
        tests = [] if test is None else test if each else [test]
        self.shared = test is not None and not each
        self.class_names: tuple[str, ...] = ()
        pairs = [
            self._pair(part, f"client {n}", columns) for n, part in enumerate([*train, *tests])
        ]
        self.samples = _joined(pairs)
        ends = np.cumsum([len(labels) for _, labels in pairs], dtype=np.int64)
        parts = [
            np.arange(end - len(labels), end) for (_, labels), end in zip(pairs, ends, strict=True)
        ]
        self.train, self.tests = parts[: len(train)], parts[len(train) :]

    def _pair(self, part: Any, who: str, columns: tuple[str, str] | None) -> Pair:
        """A part of the data as arrays that fit together."""
        if _gives_rows(part):
            part = self._from_rows(part, columns)
        try:
            if isinstance(part, Dataset):
                items = [part[place] for place in range(len(part))]  # type: ignore[arg-type]
                part = default_collate(items) if items else ((), ())
            inputs, labels = (
                one if isinstance(one, np.ndarray) else torch.as_tensor(one).detach().cpu().numpy()
                for one in part
            )
        except (TypeError, ValueError, RuntimeError) as error:
            raise DataError(f"{who}: expected (inputs, labels) as arrays: {error}") from None
        if not inputs.shape or not labels.shape:
            raise DataError(f"{who}: expected (inputs, labels) as arrays, not single numbers")
        if len(inputs) != len(labels):
            raise DataError(f"{who}: {len(inputs)} inputs but {len(labels)} labels")
        if not len(inputs):
            raise DataError(f"{who} has no samples; leave it out")
        if labels.dtype.kind not in "iub":
            raise DataError(f"{who}: labels must be integers, not {labels.dtype}")
        if inputs.dtype.kind == "f" and not np.isfinite(inputs).all():
            raise DataError(f"{who}: its inputs contain NaN or infinite numbers; remove them")
        if inputs.dtype.kind == "u" and inputs.dtype.itemsize > 1:  # PyTorch hardly knows them
            inputs = inputs.astype(np.float32)
        return inputs, labels

    def _from_rows(self, part: Any, columns: tuple[str, str] | None) -> Pair:
        """Rows with named columns as arrays."""
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
                f"the inputs in column '{names[0]}' have different shapes; resize them first"
            )
        return np.stack(inputs), np.array([row[names[1]] for row in rows])


def _joined(pairs: Sequence[Pair]) -> TensorSamples:
    if len({inputs.shape[1:] for inputs, _ in pairs}) > 1:
        raise DataError("the clients' inputs have different shapes")
    try:
        inputs, labels = (
            torch.from_numpy(np.concatenate(part)) for part in zip(*pairs, strict=True)
        )
    except (TypeError, ValueError) as error:
        raise DataError(f"the clients' arrays do not fit together: {error}") from None
    return TensorSamples(inputs, labels.long())


def deal(samples: Indices, clients: int, seed: int) -> list[Indices]:
    """Deals a test set for all out evenly among the clients."""
    shuffled = samples[stream(seed, Purpose.SPLIT).permutation(len(samples))]
    return [np.sort(part) for part in np.array_split(shuffled, clients)]


def scaled(
    samples: TensorSamples,
    scale: bool | None,
    mean: Sequence[float] = (),
    std: Sequence[float] = (),
) -> Samples:
    """Samples divided by 255 if `scale` is set, or it is None and they are pictures of bytes."""
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
            "the inputs are bytes: taken for pixels and divided by 255 (set scale=True to"
            " confirm, scale=False to leave them as they are)",
            stacklevel=4,
        )
        return True
    some = inputs[:100]
    if picture and float(some.max()) > 1.5 and torch.equal(some, some.round().clamp(0, WHITE)):
        warnings.warn(
            "the inputs look like pixels from 0 to 255; scale=True would divide them by 255 (set"
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
    found = next((name for name in usual if name in row), None)
    if found is None:
        raise DataError(
            f"which column holds the {what}? There are {', '.join(row)}: say columns=(inputs,"
            " targets)"
        )
    return found


def _array(value: Any) -> NDArray[Any]:
    """One input; a picture as bytes ``[channels, H, W]``."""
    if hasattr(value, "convert"):  # a picture of Pillow's
        return pixels(value, 1 if value.mode in ("1", "L", "I", "F") else 3)
    array = np.asarray(value)
    if array.ndim == 2 and array.dtype == np.uint8:
        return array[None]
    channels_last = array.ndim == 3 and array.shape[-1] in (1, 3) and array.shape[0] not in (1, 3)
    return array.transpose(2, 0, 1) if channels_last else array
