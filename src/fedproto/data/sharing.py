"""The options of sharing samples out among clients, the same for all data sets that have them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np

from fedproto.data.base import DataSource
from fedproto.data.federation import Federation, hold_out, split_clients
from fedproto.data.normalize import Normalize, normalized
from fedproto.data.partition import (
    by_classes,
    by_classes_and_sizes,
    by_dirichlet,
    by_first_samples,
    iid,
    sort_and_partition,
)
from fedproto.data.samples import Samples
from fedproto.options import option
from fedproto.rng import Indices, Purpose, stream

Partition: TypeAlias = Literal["classes", "class-sizes", "first", "dirichlet", "iid", "sorted"]


@dataclass(frozen=True)
class HeldOut(DataSource):
    """A data set of which the server may keep a part for validation."""

    validation: float = option(
        0.0, "share of every client that the server keeps for validation", at_least=0, at_most=0.9
    )

    test: float = option(
        0.2, "share of every client that is kept for the test", at_least=0, at_most=0.9
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
    ) -> Federation:
        """A federation of these parts: first the validation part out, then the test part.

        The samples are normalised here, for all data sets alike.

        `validation` are more samples for the server, in no client's part; `labels` are the classes
        of samples whose targets are label maps.
        """
        kept, taken, owner = hold_out(parts, self.seed, self.validation)
        if validation is not None:
            taken = np.concatenate([taken, validation])
            owner = np.concatenate([owner, np.full(len(validation), -1, dtype=np.int64)])
        return Federation(
            name=name,
            samples=normalized(samples, self.normalize, self.mean, self.std),
            clients=split_clients(kept, self.seed, self.test),
            num_classes=num_classes,
            input_shape=input_shape,
            task=task,
            validation=taken,
            validation_owner=owner,
            labels=labels,
            class_names=tuple(class_names),
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
    alpha: float = option(0.1, "'dirichlet': concentration of the class mix", above=0)
    gamma: float = option(3.0, "'dirichlet': tail exponent of the sizes", above=0)
    shards_per_client: int = option(1, "'sorted': shards of a client", at_least=1)

    def share(self, labels: Indices) -> list[Indices]:
        """Each client's samples."""
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
        return iid(labels, rng, clients=self.clients)
