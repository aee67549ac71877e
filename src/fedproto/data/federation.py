"""A federation: samples, and which of them each client holds for training and test."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch

from fedproto.data.given import Given, deal, scaled
from fedproto.data.samples import MappedSamples, Samples, TensorSamples
from fedproto.data.tasks import task_named
from fedproto.disk.files import check_limit
from fedproto.errors import DataError
from fedproto.options import Options, option
from fedproto.rng import Indices, Purpose, stream
from fedproto.types import POOLED, VOID


@dataclass(frozen=True, repr=False)
class Client:
    """One client's samples for training and for the test, as indices."""

    train: Indices
    test: Indices

    def __repr__(self) -> str:
        return f"Client({len(self.train):,} training samples, {len(self.test):,} test samples)"


MOST_MEANS = 10_000
"""Pixels that are normalised one by one, up to which a run keeps their means."""


@dataclass(frozen=True)
class DataFacts(Options):
    """The facts about a federation that ``run.json`` keeps."""

    name: str = option("", "name of the data set")
    clients: int = option(0, "number of clients", at_least=0)
    train: int = option(0, "samples for training", at_least=0)
    test: int = option(0, "samples for the test", at_least=0)
    test_set: str = option("split", "source of the test samples")
    num_classes: int = option(1, "number of classes", at_least=1)
    class_names: tuple[str, ...] = option((), "names of the classes")
    input_shape: tuple[int, ...] = option((), "shape of an input")
    task: Literal["classification", "segmentation"] = option("classification", "task")
    mean: tuple[float, ...] | None = option(None, "mean of the normalisation")
    std: tuple[float, ...] | None = option(None, "standard deviation of the normalisation")
    largest_test_share: float = option(0.0, "largest share of one client in the test samples")
    test_overlap: float = option(0.0, "share of the test samples that are also training samples")


MOST_TEST = 0.3
"""A client with a larger share of the test samples than this dominates the pooled score."""


def cautions(facts: Mapping[str, Any]) -> list[str]:
    """What to know about a federation's test samples, from the facts that its runs keep.

    Where all clients share one test set, where one client holds a large share of the test samples,
    and where clients train on some of them; a ``test_overlap`` of True stands for an unknown share.
    """
    name = str(facts.get("name", ""))
    # A run directory from elsewhere may contain anything.
    uneven, overlap = (
        share if isinstance(share, float) and 0 <= share <= 1 else 0.0
        for share in (facts.get("largest_test_share"), facts.get("test_overlap"))
    )
    found = []
    if (test_set := facts.get("test_set", "split")) != "split":
        found.append(f"{name} is tested on one set for all clients ({test_set})")
    if uneven > MOST_TEST:
        found.append(
            f"one client holds {100 * uneven:.0f} % of the test samples of {name}, so the pooled"
            " score is mostly its own: see the mean client and the worst tenth as well"
        )
    if overlap or facts.get("test_overlap") is True:
        part = f"{100 * overlap:.1f} %" if overlap else "some"
        found.append(
            f"{part} of the test samples of {name} are in some client's training part, so scores"
            " are too high; every data.partition but 'first' avoids that"
        )
    return found


@dataclass(frozen=True, repr=False)
class Federation:
    """Clients with their data.

    Attributes:
        name: Name in records.
        num_classes: Number of classes over all clients.
        task: Name of the task, as in `fedproto.data.tasks`.
        class_names: Names of the classes, in the order of their labels; may be empty.
        validation: Samples the server keeps for choosing among models; in no client's share.
        validation_owner: From which client's samples each of them was taken, −1 for none; None
            if unknown.
        labels: The class of every sample if the targets are label maps: its main object,
            counted from 0 without the background. None if the targets are classes.
        test_set: Where the test samples come from: ``split`` off every client's own; anything
            else, such as ``official``, is one set for all, dealt out evenly among the clients.
    """

    name: str
    samples: Samples
    clients: Sequence[Client]
    num_classes: int
    input_shape: tuple[int, ...]
    task: str = "classification"
    validation: Indices = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    labels: Indices | None = None
    class_names: tuple[str, ...] = ()
    validation_owner: Indices | None = None
    test_set: str = "split"

    def __post_init__(self) -> None:
        object.__setattr__(self, "clients", tuple(self.clients))

    @property
    def has_label_maps(self) -> bool:
        """Whether its targets are maps with a label per pixel, class 0 the background."""
        return task_named(self.task).label_maps

    @cached_property
    def train_sizes(self) -> Indices:
        """Number of training samples per client."""
        return np.array([len(client.train) for client in self.clients], dtype=np.int64)

    @cached_property
    def test_sizes(self) -> Indices:
        """Number of test samples per client."""
        return np.array([len(client.test) for client in self.clients], dtype=np.int64)

    @cached_property
    def _train_indices(self) -> Indices:
        return joined(client.train for client in self.clients)

    @cached_property
    def test_indices(self) -> Indices:
        """The union of the clients' test parts."""
        return joined(client.test for client in self.clients)

    @property
    def largest_test_share(self) -> float:
        """The largest part of all test samples that one client holds."""
        sizes = self.test_sizes
        return float(sizes.max() / sizes.sum()) if len(sizes) > 1 and sizes.any() else 0.0

    @cached_property
    def test_overlap(self) -> float:
        """The share of the test samples that are in some client's training part.

        It is 0 under every partition but ``first``, which shares samples among clients.
        """
        tested = np.unique(self.test_indices)
        return float(np.isin(tested, self._train_indices).mean()) if len(tested) else 0.0

    def validation_of(self, client: int) -> Indices:
        """The samples of a client that were taken for validation."""
        if self.validation_owner is None:
            return np.empty(0, dtype=np.int64)
        return np.compress(self.validation_owner == client, self.validation)

    def train_indices(self, client: int) -> Indices:
        """A client's training samples; those of all clients for `POOLED`."""
        return self._train_indices if client == POOLED else self.clients[client].train

    def class_name(self, label: int) -> str:
        """Name of a class; its number if it has none."""
        return self.class_names[label] if label < len(self.class_names) else str(label)

    def about(self) -> dict[str, Any]:
        """Facts that `DataFacts` reads back: all that its models need to be built and applied.

        Mean and deviation of normalised inputs are None where they are not known here, and where
        they are too many to be written down.
        """
        like = self.samples
        mean, std = (like.mean, like.std) if isinstance(like, MappedSamples) else ((), ())
        told = isinstance(like, MappedSamples | TensorSamples) and len(mean) <= MOST_MEANS
        return {
            "name": self.name,
            "clients": len(self.clients),
            "train": int(self.train_sizes.sum()),
            "test": len(self.test_indices),
            "test_set": self.test_set,
            "largest_test_share": self.largest_test_share,
            "test_overlap": self.test_overlap,
            "num_classes": self.num_classes,
            "class_names": list(self.class_names),
            "input_shape": list(self.input_shape),
            "task": self.task,
            "mean": list(mean) if told else None,
            "std": list(std) if told else None,
        }

    def __repr__(self) -> str:
        kept = f", {len(self.validation):,} for validation" if len(self.validation) else ""
        return (
            f"Federation({self.name}: {len(self.clients):,} clients with"
            f" {int(self.train_sizes.sum()):,} samples for training{kept} and"
            f" {len(self.test_indices):,} for the test, {self.num_classes} classes, inputs"
            f" {self.input_shape}, {self.task})"
        )

    @staticmethod
    def from_clients(
        clients: Sequence[Any],
        *,
        test: Any = None,
        num_classes: int | None = None,
        test_fraction: float = 0.2,
        seed: int = 0,
        name: str = "own data",
        task: str = "classification",
        class_names: Sequence[str] = (),
        columns: tuple[str, str] | None = None,
        scale: bool | None = None,
        mean: Sequence[float] = (),
        std: Sequence[float] = (),
    ) -> Federation:
        """A federation of a user's own data, split into training and test per client.

        Args:
            clients: Per client ``(inputs, labels)`` as arrays or tensors; or a `torch` data set; or
                rows with named columns, as Hugging Face's and Flower's data sets give them; or
                ``{"train": ..., "test": ...}`` with any of these.
            test: Test data of one's own in the place of a split: a list with one part per client,
                or one part for all, which is dealt out evenly among the clients.
            num_classes: Number of classes; counted from the labels when not given.
            test_fraction: Share of every client that is kept for the test.
            seed: For the split.
            name: Name in records.
            task: ``classification``, or ``segmentation`` where the labels are label maps
                ``[N, H, W]`` with the background as class 0 and void as 255.
            class_names: Names of the classes.
            columns: Names of the columns of inputs and labels, for rows; guessed by default.
            scale: Whether to divide inputs by 255; by default bytes of pictures are, with a
                warning.
            mean: Mean per channel, of pixels between 0 and 1.
            std: Standard deviation per channel.

        Raises:
            DataError: If a client is empty or its arrays do not fit together.
        """
        given = Given(clients, test, columns)
        inputs, labels = given.samples.inputs, given.samples.targets
        maps = task_named(task).label_maps
        if labels.shape[1:] != (inputs.shape[2:] if maps else ()):
            one = "a map of its height and width" if maps else "the number of its class"
            raise DataError(
                f"the label of an input {tuple(inputs.shape[1:])} must be {one}, not an array of"
                f" shape {tuple(labels.shape[1:])}"
            )
        if maps:
            labels = labels[labels != VOID]
        num_classes = checked_num_classes(labels, num_classes)
        samples = scaled(given.samples, scale, mean, std)
        tests = deal(given.tests[0], len(given.train), seed) if given.shared else given.tests
        return Federation(
            name=name,
            samples=samples,
            clients=(
                list(map(Client, given.train, tests))
                if tests
                else split_clients(given.train, seed, test_fraction)
            ),
            num_classes=num_classes,
            input_shape=tuple(inputs.shape[1:]),
            task=task,
            class_names=tuple(class_names) or given.class_names,
            test_set="given" if given.shared else "split",
        )


def statistics(federation: Federation) -> dict[str, Any]:
    """The columns of the paper's Table 1 and more, by name; the background is not a class.

    `test_overlap` is the share of test samples that are also training samples.
    """
    counts = class_counts(federation)
    sizes, classes = counts.sum(axis=1), (counts > 0).sum(axis=1)
    return {
        "classes": counts.shape[1],
        "clients": len(sizes),
        "samples": int(sizes.sum()),
        "mean": float(sizes.mean()),
        "std": float(sizes.std()),
        "smallest": int(sizes.min()),
        "largest": int(sizes.max()),
        "fewest_classes": int(classes.min()),
        "mean_classes": float(classes.mean()),
        "most_classes": int(classes.max()),
        "train": int(federation.train_sizes.sum()),
        "test": len(federation.test_indices),
        "validation": len(federation.validation),
        "test_set": federation.test_set,
        "test_overlap": federation.test_overlap,
    }


def class_counts(federation: Federation) -> Indices:
    """Number of a client's own samples per class, ``[K, C]``.

    These are its training samples and those split off for the test, not a common test set. For
    segmentation the background is no class.
    """
    labels = sample_labels(federation)
    num_classes = federation.num_classes - federation.has_label_maps
    own_test = federation.test_set == "split"
    parts = [
        np.concatenate([client.train, client.test]) if own_test else client.train
        for client in federation.clients
    ]
    return np.array([np.bincount(labels[part], minlength=num_classes) for part in parts])


def sample_labels(federation: Federation) -> Indices:
    """The class of every sample."""
    if federation.labels is not None:
        return federation.labels
    if federation.has_label_maps:
        raise DataError(f"{federation.name} has no label per image")
    samples = federation.samples
    if not isinstance(samples, TensorSamples | MappedSamples):
        raise DataError(f"the labels of {federation.name} are with the clients")
    return samples.targets.cpu().numpy().astype(np.int64)


def joined(parts: Iterable[Indices]) -> Indices:
    """Parts one after another; an empty array where there are none."""
    return np.concatenate([np.empty(0, dtype=np.int64), *parts]).astype(np.int64)


def split_clients(
    parts: Sequence[Indices], seed: int, test_fraction: float = 0.2
) -> Sequence[Client]:
    """Splits every client's samples into training and test, once, from the seed.

    The training part is rounded down but never empty, so that a client of one sample trains on it
    and has nothing to test.
    """
    if not 0 <= test_fraction < 1:
        raise DataError(f"test_fraction must be at least 0 and below 1, not {test_fraction}")
    sizes = np.fromiter(map(len, parts), np.int64, len(parts))
    if len(parts) and not sizes.all():
        raise DataError(
            f"client {int(sizes.argmin())} has no samples; use fewer clients or more data"
        )
    starts = np.concatenate([[0], np.cumsum(sizes)])
    samples = joined(parts)
    cuts = np.maximum(1, ((1 - test_fraction) * sizes + 1e-9).astype(np.int64))
    owner = np.repeat(np.arange(len(parts)), sizes)
    keys = stream(seed, Purpose.SPLIT).random_sample(len(samples))
    shuffled = np.lexsort((keys, owner))
    tested = np.arange(len(samples)) - starts[owner] >= cuts[owner]
    samples = samples[shuffled]
    samples = samples[np.lexsort((samples, tested, owner))]
    ends = zip(starts[:-1], starts[:-1] + cuts, starts[1:], strict=True)
    return [Client(samples[start:cut], samples[cut:end]) for start, cut, end in ends]


def hold_out(
    parts: Sequence[Indices], seed: int, fraction: float
) -> tuple[list[Indices], Indices, Indices]:
    """Takes a share of every client's samples away for the server, once, from the seed.

    The rest is rounded down but never empty: of ten samples and a fraction of 0.1 a client keeps
    nine, of nine it keeps eight. Also gives the samples taken, and the client each was taken from.
    """
    if fraction == 0:
        return list(parts), np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
    rng = stream(seed, Purpose.VALIDATION)
    kept, taken = [], []
    for part in parts:
        shuffled = part[rng.permutation(len(part))]
        cut = max(1, int((1 - fraction) * len(part) + 1e-9))
        kept.append(np.sort(shuffled[:cut]))
        taken.append(shuffled[cut:])
    everything, owner = np.concatenate(taken), np.repeat(np.arange(len(parts)), [*map(len, taken)])
    order = np.argsort(everything, kind="stable")
    return kept, everything[order], owner[order]


def checked_num_classes(labels: torch.Tensor, num_classes: int | None) -> int:
    """The number of classes, as given or as labels have it; no label is outside of it."""
    lowest, highest = int(labels.min()), int(labels.max())
    if lowest < 0 or (num_classes is not None and highest >= num_classes):
        wrong = lowest if lowest < 0 else highest
        raise DataError(
            f"label {wrong} is outside the classes 0 to {(num_classes or highest + 1) - 1}"
        )
    check_limit("classes", highest + 1, f"label {highest}")
    return highest + 1 if num_classes is None else num_classes
