"""Everything random is a function of seed, purpose and numbers such as round, client and epoch.

NumPy promises that the streams of its legacy `RandomState` never change, which it does not promise
for the newer generators; a schedule must not depend on the version a client happens to have.
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
    """What a random stream is for; the numbers are part of every result and never change."""

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
    MEASURED_CLIENTS = 13
    EMBEDDED = 14
    MAPPED = 15
    SECRET = 16
    TUNING = 17
    SHIFT = 20


def stream(seed: int, purpose: Purpose, *numbers: int) -> np.random.RandomState:
    """The random stream of one purpose, by numbers such as round, client and epoch."""
    words = entropy(seed, purpose, *numbers)
    return np.random.RandomState(np.random.MT19937(np.random.SeedSequence(words)))


def entropy(seed: int, purpose: Purpose, *numbers: int) -> list[int]:
    """What the stream of one purpose is made from."""
    # The pooled data's client id is -1, and seed sequences take no negative numbers.
    return [seed, int(purpose), *(number + 1 for number in numbers)]


@lru_cache(maxsize=2**14)
def torch_seed(seed: int, purpose: Purpose, *numbers: int) -> int:
    """A seed for PyTorch's generator, from the stream of one purpose; a sweep's runs share it."""
    return int(stream(seed, purpose, *numbers).randint(0, 2**31 - 1))


@contextmanager
def seeded(seed: int, device: torch.device | None = None) -> Iterator[None]:
    """Seeds PyTorch's generators for a while and then puts back what they were."""
    devices = [device] if device is not None and device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        yield
