"""Options that data sets have in common: validation and test parts, normalisation, partition."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np

from fedproto.data import partition as rules
from fedproto.data.base import DataSource
from fedproto.data.federation import Client, Federation, hold_out, split_clients
from fedproto.data.given import deal
from fedproto.data.samples import (
    MappedSamples,
    Normalize,
    Shift,
    TensorSamples,
    normalized,
    shifted,
)
from fedproto.errors import ConfigError, DataError
from fedproto.options import option
from fedproto.rng import Indices, Purpose, stream

Partition: TypeAlias = Literal[
    "classes",
    "class-sizes",
    "first",
    "dirichlet",
    "dirichlet-equal",
    "dirichlet-class",
    "quantity",
    "iid",
    "sorted",
    "groups",
]
TestSet: TypeAlias = float | Literal["official", "split"]
_TEST_SHARE = 0.2
_RULES: Mapping[str, Callable[..., list[Indices]]] = {
    "classes": rules.by_classes,
    "class-sizes": rules.by_classes_and_sizes,
    "first": rules.by_first_samples,
    "dirichlet": rules.by_dirichlet,
    "dirichlet-equal": rules.by_dirichlet_of_equal_sizes,
    "dirichlet-class": rules.by_dirichlet_per_class,
    "quantity": rules.by_quantity,
    "iid": rules.iid,
    "sorted": rules.sort_and_partition,
}
"""The function of each partition."""
_OPTIONS = {name: list(inspect.signature(rule).parameters)[2:] for name, rule in _RULES.items()}
"""The options of each partition: its function's keywords."""


@dataclass(frozen=True)
class HeldOut(DataSource):
    """A data set of which the server may keep a part for validation."""

    validation: float = option(
        0.0, "share of every client that the server keeps for validation", at_least=0, at_most=0.9
    )

    test: TestSet = option(
        _TEST_SHARE,
        "test set: 'official', or the share of every client that is kept for it ('split' for 0.2)",
        at_least=0,
        at_most=0.9,
    )
    normalize: Normalize = option(
        "given",
        "normalisation of inputs: by 'mean' and 'std', none, or to mean 0 and standard deviation 1"
        " per channel or pixel",
    )
    mean: tuple[float, ...] = option((), "mean per channel, of pixels between 0 and 1")
    std: tuple[float, ...] = option((), "standard deviation per channel")

    def federation(
        self,
        name: str,
        samples: TensorSamples | MappedSamples,
        parts: Sequence[Indices],
        *,
        validation: Indices | None = None,
        official: Indices | None = None,
        test_set: str = "official",
        **facts: Any,
    ) -> Federation:
        """A federation of these parts: normalised, validation samples held out, then split.

        Args:
            name: Name in records.
            samples: All samples.
            parts: Each client's samples.
            validation: More samples for the server, in no client's part.
            official: A test set for all, dealt out evenly among the clients instead of a split.
            test_set: Name of that test set in records.
            facts: More fields of the federation.
        """
        if self.test == "official" and official is None:
            raise DataError(
                f"{name} has no official test set; set data.test to a share such as 0.2"
            )
        kept, taken, owner = hold_out(parts, self.seed, self.validation)
        if validation is not None:
            taken = np.concatenate([taken, validation])
            owner = np.concatenate([owner, np.full(len(validation), -1, dtype=np.int64)])
        if official is None:
            share = _TEST_SHARE if isinstance(self.test, str) else self.test
            clients = split_clients(kept, self.seed, share)
        else:
            clients = list(map(Client, kept, deal(official, len(kept), self.seed)))
        return Federation(
            name=name,
            samples=normalized(samples, self.normalize, self.mean, self.std),
            clients=clients,
            input_shape=tuple(samples.inputs.shape[1:]),
            validation=taken,
            validation_owner=owner,
            test_set="split" if official is None else test_set,
            **facts,
        )


@dataclass(frozen=True)
class SharedOut(HeldOut):
    """A data set without clients of its own, divided by one of the partitions."""

    clients: int = option(10, "number of clients", at_least=1)
    partition: Partition = option("dirichlet", "how samples are divided among clients")
    classes_per_client: int = option(2, "'classes', 'class-sizes': classes per client", at_least=1)
    sigma: float = option(2.0, "'classes', 'class-sizes': σ of the log-normal sizes", at_least=0)
    minimum: int = option(
        5, "'classes', 'class-sizes': minimum samples of each class of a client", at_least=1
    )
    mean_size: float = option(
        100.0, "'class-sizes', 'first': mean number of samples of a client", above=0
    )
    alpha: float = option(
        0.1,
        "'dirichlet…': concentration of the class mix; 'quantity': of the sizes",
        above=0,
    )
    gamma: float = option(3.0, "'dirichlet': tail exponent of the sizes", above=0)
    shards_per_client: int = option(1, "'sorted': shards per client", at_least=1)
    min_size: int = option(
        10, "'dirichlet-class', 'quantity': minimum samples of a client", at_least=1
    )
    shift: Shift = option("none", "feature shift: what differs from client to client")
    shift_level: float = option(
        0.1,
        "feature shift of the last client: std of the noise, degrees, or std of the blur in pixels",
        at_least=0,
    )

    def federation(
        self,
        name: str,
        samples: TensorSamples | MappedSamples,
        parts: Sequence[Indices],
        **facts: Any,
    ) -> Federation:
        """A federation of these parts, whose features are shifted if that is asked for."""
        moved = shifted(samples, parts, self.shift, self.shift_level, self.seed)
        return super().federation(name, moved, parts, **facts)

    def check_given(self, names: Collection[str]) -> None:
        """Refuses options of other partitions where none is chosen."""
        used = {"clients", *_OPTIONS.get(self.partition, ())}
        rules = {name: rule for rule in reversed(_OPTIONS) for name in _OPTIONS[rule]}
        idle = [name for name in names if name in rules.keys() - used]
        if idle and "partition" not in names:
            raise ConfigError(
                f"{idle[0]} has no effect with partition '{self.partition}', the default here; set"
                f" partition as well, such as to '{rules[idle[0]]}'"
            )

    def share(self, labels: Indices, groups: Indices | None = None) -> list[Indices]:
        """Each client's samples; `groups` are the samples' natural groups, where there are any."""
        rng = stream(self.seed, Purpose.PARTITION)
        if self.partition == "groups":
            if groups is None:
                raise DataError("this data set has no natural groups; choose another partition")
            return rules.within_groups(groups, rng, clients=self.clients)
        options = {name: getattr(self, name) for name in _OPTIONS[self.partition]}
        return _RULES[self.partition](labels, rng, **options)
