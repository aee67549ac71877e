"""Everything random is a function of seed, purpose and numbers such as round, client and epoch.

NumPy promises that the distributions of its legacy `RandomState` never change, which it does not
promise for `Generator`; a schedule must not depend on the version a client happens to have. Under
it runs Philox, which is made from a seed in a ninth of the time that the Mersenne Twister takes
(11 against 98 µs): a round of a large sweep makes thousands of streams.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

Indices: TypeAlias = NDArray[np.int64]


class Purpose(enum.IntEnum):
    """The purpose of a random stream; the numbers are part of every result and never change."""

    COHORT = 1
    STRAGGLERS = 2
    EPOCHS = 3
    BATCHES = 4
    MODEL = 5
    INSIDE_MODEL = 6
    SPLIT = 7
    PARTITION = 8
    VALIDATION = 9
    AUGMENT = 10
    SAMPLES = 11
    MEASURED_SAMPLES = 12
    EMBEDDED = 14
    MAPPED = 15
    TUNING = 17
    SHIFT = 20


def stream(seed: int, purpose: Purpose, *numbers: int) -> np.random.RandomState:
    """The random stream of one purpose, by numbers such as round, client and epoch."""
    # The pooled data's client id is -1, and seed sequences take no negative numbers.
    entropy = [seed, int(purpose), *(number + 1 for number in numbers)]
    return np.random.RandomState(np.random.Philox(np.random.SeedSequence(entropy)))


@lru_cache(maxsize=2**14)
def torch_seed(seed: int, purpose: Purpose, *numbers: int) -> int:
    """A seed for PyTorch's generator, from the stream of one purpose; a sweep's runs share it."""
    return int(stream(seed, purpose, *numbers).randint(0, 2**31 - 1))


@contextmanager
def seeded(seed: int, device: torch.device | None = None) -> Iterator[None]:
    """Seeds PyTorch's generators inside the block and restores their states after it.

    On a CPU its own alone: to note the seed for devices that are not there takes a fifth of a
    millisecond, in every job.
    """
    devices = [device] if device is not None and device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        if device.type == "cpu" if device is not None else not torch.cuda.is_available():
            torch.default_generator.manual_seed(seed)
        else:
            torch.manual_seed(seed)
        yield
