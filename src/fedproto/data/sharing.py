"""The options of sharing samples out among clients, the same for all data sets that have them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np

from fedproto.data.base import DataSource
from fedproto.data.federation import Client, Federation, hold_out, split_clients
from fedproto.data.given import deal
from fedproto.data.partition import (
    by_classes,
    by_classes_and_sizes,
    by_dirichlet,
    by_dirichlet_of_equal_sizes,
    by_dirichlet_per_class,
    by_first_samples,
    by_quantity,
    iid,
    sort_and_partition,
    within_groups,
)
from fedproto.data.samples import Samples
from fedproto.data.transforms import Normalize, Shift, normalized, shifted
from fedproto.errors import DataError
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
        "inputs: by mean and std as given, not at all, or to mean 0 and deviation 1 per channel or"
        " pixel",
    )
    mean: tuple[float, ...] = option((), "subtracted per channel from pixels between 0 and 1")
    std: tuple[float, ...] = option((), "pixels are divided by this per channel")

    def federation(
        self,
        name: str,
        samples: Samples,
        parts: Sequence[Indices],
        *,
        num_classes: int,
        input_shape: tuple[int, ...],
        task: str = "classification",
        validation: Indices | None = None,
        labels: Indices | None = None,
        class_names: Sequence[str] = (),
        official: Indices | None = None,
        test_set: str = "official",
    ) -> Federation:
        """A federation of these parts: first the validation part out, then the test part.

        The samples are normalised here, for all data sets alike.

        `validation` are more samples for the server, in no client's part; `labels` are the classes
        of samples whose targets are label maps. `official` is a test set for all,
        dealt out evenly among the clients in the place of test parts of their own, and `test_set`
        what it is called.
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
            tests = deal(official, len(kept), self.seed)
            clients = list(map(Client, kept, tests))
        return Federation(
            name=name,
            samples=normalized(samples, self.normalize, self.mean, self.std),
            clients=clients,
            num_classes=num_classes,
            input_shape=input_shape,
            task=task,
            validation=taken,
            validation_owner=owner,
            labels=labels,
            class_names=tuple(class_names),
            test_set="split" if official is None else test_set,
        )


@dataclass(frozen=True)
class SharedOut(HeldOut):
    """A data set without clients of its own, shared out by one of the partitioners."""

    clients: int = option(10, "number of clients", at_least=1)
    partition: Partition = option("dirichlet", "how samples are shared out")
    classes_per_client: int = option(2, "'classes', 'class-sizes': classes of a client", at_least=1)
    sigma: float = option(2.0, "'classes', 'class-sizes': spread of the sizes", at_least=0)
    minimum: int = option(
        5, "'classes', 'class-sizes': samples of each of its classes at least", at_least=1
    )
    mean_size: float = option(
        100.0, "'class-sizes', 'first': expected samples of a client", above=0
    )
    alpha: float = option(
        0.1,
        "'dirichlet…': concentration of the class mix; 'quantity': of the sizes",
        above=0,
    )
    gamma: float = option(3.0, "'dirichlet': tail exponent of the sizes", above=0)
    shards_per_client: int = option(1, "'sorted': shards of a client", at_least=1)
    min_size: int = option(
        10, "'dirichlet-class', 'quantity': samples of a client at least", at_least=1
    )
    shift: Shift = option("none", "feature shift: what differs from client to client")
    shift_level: float = option(
        0.1,
        "feature shift of the last client: std of the noise, degrees, or std of the blur in pixels",
        at_least=0,
    )

    def federation(
        self, name: str, samples: Samples, parts: Sequence[Indices], **facts: Any
    ) -> Federation:
        """A federation of these parts, whose features are shifted if that is asked for."""
        moved = shifted(samples, parts, self.shift, self.shift_level, self.seed)
        return super().federation(name, moved, parts, **facts)

    def share(self, labels: Indices, groups: Indices | None = None) -> list[Indices]:
        """Each client's samples; `groups` are the samples' natural groups, where there are any."""
        rng = stream(self.seed, Purpose.PARTITION)
        if self.partition == "classes":
            return by_classes(
                labels,
                rng,
                clients=self.clients,
                classes_per_client=self.classes_per_client,
                sigma=self.sigma,
                minimum=self.minimum,
            )
        if self.partition in ("class-sizes", "first"):
            share = by_classes_and_sizes if self.partition == "class-sizes" else by_first_samples
            return share(
                labels,
                rng,
                clients=self.clients,
                classes_per_client=self.classes_per_client,
                mean_size=self.mean_size,
                sigma=self.sigma,
                minimum=self.minimum,
            )
        if self.partition == "dirichlet":
            return by_dirichlet(
                labels, rng, clients=self.clients, alpha=self.alpha, gamma=self.gamma
            )
        if self.partition == "sorted":
            return sort_and_partition(
                labels, rng, clients=self.clients, shards_per_client=self.shards_per_client
            )
        if self.partition == "dirichlet-equal":
            return by_dirichlet_of_equal_sizes(labels, rng, clients=self.clients, alpha=self.alpha)
        if self.partition in ("dirichlet-class", "quantity"):
            skew = by_dirichlet_per_class if self.partition == "dirichlet-class" else by_quantity
            return skew(labels, rng, clients=self.clients, alpha=self.alpha, minimum=self.min_size)
        if self.partition == "groups":
            if groups is None:
                raise DataError("this data set has no natural groups; choose another partition")
            return within_groups(groups, rng, clients=self.clients)
        return iid(labels, rng, clients=self.clients)
