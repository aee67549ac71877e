"""The schedule: cohorts, epochs and batches as pure functions of seed, round and client.

Nothing here knows the strategy's rule or the engine, so all runs of a sweep with the same seed see
the same cohorts, stragglers and batch orders, in process and over a network alike.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np

from fedproto.rng import Indices, Purpose, stream


def cohort(
    seed: int, round_: int, sizes: Indices, number: int, sampling: Literal["size", "uniform"]
) -> list[int]:
    """The clients of a round: distinct, drawn by size or uniformly, in ascending order."""
    weight = sizes.astype(np.float64) if sampling == "size" else np.ones(len(sizes))
    # The first arrivals of independent exponential clocks are a draw without replacement in which
    # each next client is chosen in proportion to its weight among those left.
    arrival = stream(seed, Purpose.COHORT, round_).exponential(size=len(sizes)) / weight
    # Sorting a million for the first hundred would take longer than all else.
    number = min(number, len(arrival))
    early = np.flatnonzero(arrival <= np.partition(arrival, number - 1)[number - 1])
    return sorted(early[np.argsort(arrival[early], kind="stable")[:number]].tolist())


def stragglers(seed: int, round_: int, cohort: list[int], delta: float) -> list[int]:
    """The clients of a cohort that finish only part of their epochs: ``round(δ·K')`` of them.

    Those at a smaller δ are among those at a larger one.
    """
    order = stream(seed, Purpose.STRAGGLERS, round_).permutation(len(cohort))
    return sorted(cohort[index] for index in order[: round(delta * len(cohort))])


def partial_epochs(seed: int, round_: int, client: int, epochs: int, least: int = 0) -> int:
    """The whole epochs ``F' ~ U{least, …, F-1}`` that a straggler finishes; none of one."""
    least = min(least, epochs - 1)
    return least + int(stream(seed, Purpose.EPOCHS, round_, client).randint(epochs - least))


def _permutation(size: int, seed: int, purpose: Purpose, *numbers: int) -> Indices:
    return stream(seed, purpose, *numbers).permutation(size).astype(np.int64)


_known_permutation = lru_cache(maxsize=2**13)(_permutation)
"""The runs of a sweep ask for the same ones; kept where they are small."""


@dataclass(frozen=True)
class BatchOrder:
    """A job's mini-batches, as a value small enough to send to a client.

    Attributes:
        batch_size: Samples per step; the last batch of an epoch may be smaller.
        max_steps: Stop after this number of steps, even inside an epoch; 0 for no limit.
    """

    seed: int
    round: int
    client: int
    num_examples: int
    batch_size: int
    epochs: int
    max_steps: int = 0

    @property
    def steps_per_epoch(self) -> int:
        """Batches in one pass over the samples."""
        return math.ceil(self.num_examples / self.batch_size)

    @property
    def steps(self) -> int:
        """Batches in all."""
        steps = self.epochs * self.steps_per_epoch
        return min(steps, self.max_steps) if self.max_steps else steps

    def epoch(self, number: int) -> Indices:
        """The order of the samples in one epoch, as positions among the client's own."""
        place = self.seed, Purpose.BATCHES, self.round, self.client, number
        shuffled = _known_permutation if self.num_examples <= 1000 else _permutation
        return shuffled(self.num_examples, *place).copy()

    def __iter__(self) -> Iterator[list[Indices]]:
        """The batches, epoch by epoch."""
        left = self.steps
        for number in range(self.epochs):
            if left == 0:
                return
            order = self.epoch(number)
            batches = [
                order[start : start + self.batch_size]
                for start in range(0, self.num_examples, self.batch_size)
            ][:left]
            left -= len(batches)
            yield batches
