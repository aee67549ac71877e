"""Many random streams at once: what `fedproto.rng.stream` would draw, in a fraction of the time.

To make a NumPy generator from a seed sequence takes a tenth of a millisecond, most of it for 624
numbers that are hashed one after another; a round of a large sweep needs thousands. Here the same
hash, which NumPy promises never to change, runs over all streams together, and the numbers are put
into one generator after another. Should NumPy ever keep them in another form, the first use finds
out and the plain way is taken.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Iterator, Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from fedproto.rng.streams import Indices, Purpose, entropy, stream

Words: TypeAlias = NDArray[np.uint32]

_POOL = 4
_KEY = 624
_SHIFT = 397
_LOCK = threading.Lock()

AT_ONCE = 256
"""Streams whose states are computed together: 0.6 MB."""

SMALL, DRAWS, ROWS = 16, 64, 2**15
"""Up to so many are shuffled for many streams together, with so many numbers each, so many rows at
a time: 8 MB. Thirty numbers suffice for almost all."""


def permutations(
    origins: Sequence[tuple[int, Purpose, *tuple[int, ...]]], sizes: Sequence[int]
) -> Iterator[Indices]:
    """``stream(*origin).permutation(size)`` for every origin and size."""
    words = [_words(entropy(*origin)) for origin in origins]
    if len({len(one) for one in words}) != 1 or not _works():
        for origin, size in zip(origins, sizes, strict=True):
            yield stream(*origin).permutation(size)
        return
    for first in range(0, len(words), AT_ONCE):
        keys = _keys(np.array(words[first : first + AT_ONCE], dtype=np.uint32))
        for key, size in zip(keys, sizes[first : first + AT_ONCE], strict=True):
            yield _shuffled(key, size)


def shuffled_rows(seed: int, purpose: Purpose, numbers: Indices, size: int) -> Indices:
    """``stream(seed, purpose, number).permutation(size)`` for every number, one per row."""
    rows = np.empty((len(numbers), size), dtype=np.int64)
    single = len(numbers) and numbers.min() >= -1 and numbers.max() < 2**32 - 1
    if size > SMALL or not single or not _works():
        origins = [(seed, purpose, number) for number in numbers.tolist()]
        for row, order in enumerate(permutations(origins, [size] * len(origins))):
            rows[row] = order
        return rows
    common = _words([seed, int(purpose)])
    for first in range(0, len(numbers), ROWS):
        part = numbers[first : first + ROWS]
        words = np.empty((len(part), len(common) + 1), dtype=np.uint32)
        words[:, :-1] = common
        words[:, -1] = part + 1
        rows[first : first + ROWS], short = _shuffled_together(_pools(words), size)
        for row in first + short:
            rows[row] = stream(seed, purpose, int(numbers[row])).permutation(size)
    return rows


def _shuffled_together(pools: Words, size: int) -> tuple[Indices, Indices]:
    """NumPy's shuffle of ``0 … size − 1`` for all streams at once.

    Returns:
        The orders, one per row, and the rows for which the numbers drawn did not suffice.
    """
    draws = _first_draws(pools)
    everyone = np.arange(len(pools))
    orders = np.tile(np.arange(size, dtype=np.int64), (len(pools), 1))
    used = np.zeros(len(pools), dtype=np.int64)
    for last in range(size - 1, 0, -1):
        # Numbers of as many bits as are needed, until one is not too large.
        mask = np.uint32((1 << last.bit_length()) - 1)
        other = np.zeros(len(pools), dtype=np.int64)
        waiting = everyone
        while len(waiting):
            found = draws[waiting, np.minimum(used[waiting], DRAWS - 1)] & mask
            used[waiting] += 1
            fits = (found <= last) | (used[waiting] > DRAWS)
            other[waiting[fits]] = np.minimum(found[fits], last)
            waiting = waiting[~fits]
        swapped = orders[everyone, other]
        orders[everyone, other] = orders[:, last]
        orders[:, last] = swapped
    return orders, np.flatnonzero(used > DRAWS)


def _first_draws(pools: Words) -> Words:
    """The first numbers that a fresh `numpy.random.MT19937` gives, ``[N, DRAWS]``.

    One is left of the state it begins with; the others are of the next, of which each needs three
    numbers of the state before.
    """
    numbers = np.arange(DRAWS - 1)
    low, high = _key(pools, np.arange(DRAWS)), _key(pools, numbers + _SHIFT)
    low[:, 0] = 0x80000000
    mixed = (low[:, :-1] & np.uint32(0x80000000)) | (low[:, 1:] & np.uint32(0x7FFFFFFF))
    odd = (mixed & np.uint32(1)) * np.uint32(0x9908B0DF)
    state: Words = np.concatenate(
        [_key(pools, np.array([_KEY - 1])), high ^ (mixed >> np.uint32(1)) ^ odd], axis=1
    )
    state ^= state >> np.uint32(11)
    state ^= (state << np.uint32(7)) & np.uint32(0x9D2C5680)
    state ^= (state << np.uint32(15)) & np.uint32(0xEFC60000)
    tempered: Words = state ^ (state >> np.uint32(18))
    return tempered


def _words(numbers: list[int]) -> list[int]:
    """Numbers as words of 32 bits, the lowest first, as seed sequences take them."""
    found = []
    for number in numbers:
        found.append(number & 0xFFFFFFFF)
        while number := number >> 32:
            found.append(number & 0xFFFFFFFF)
    return found


@functools.cache
def _constants(first: int, factor: int, number: int) -> Words:
    """``first · factorⁱ``."""
    found = [first]
    for _ in range(number - 1):
        found.append(found[-1] * factor & 0xFFFFFFFF)
    return np.array(found, dtype=np.uint32)


def _hashed(value: Words, before: Words, after: Words) -> Words:
    found: Words = (value ^ before) * after
    return found ^ (found >> np.uint32(16))


def _keys(words: Words) -> Words:
    """The state of `numpy.random.MT19937` per row of words, ``[N, 624]``."""
    # Row by row in memory, for each is copied from there as it lies.
    keys = np.ascontiguousarray(_key(_pools(words), np.arange(_KEY)))
    keys[:, 0] = 0x80000000
    return keys


def _key(pools: Words, positions: Indices) -> Words:
    """Numbers of a state at some positions, but for the first, which is always the same."""
    rounds = _constants(0x8B51F9DD, 0x58F38DED, _KEY + 1)
    return _hashed(pools[:, positions % _POOL], rounds[positions], rounds[positions + 1])


def _pools(words: Words) -> Words:
    """What seed sequences keep of their words, ``[N, 4]``."""
    number = words.shape[1]
    turns = _constants(0x43B0D7E5, 0x931E8875, _POOL * max(number, _POOL) + 1)
    used = 0

    def hashed(value: Words) -> Words:
        nonlocal used
        used += 1
        return _hashed(value, turns[used - 1 : used], turns[used : used + 1])

    def mixed(one: Words, other: Words) -> Words:
        found: Words = one * np.uint32(0xCA01F9DD) - other * np.uint32(0x4973F715)
        return found ^ (found >> np.uint32(16))

    none = np.zeros(len(words), dtype=np.uint32)
    pool = [hashed(words[:, index] if index < number else none) for index in range(_POOL)]
    for source in range(_POOL):
        for target in range(_POOL):
            if source != target:
                pool[target] = mixed(pool[target], hashed(pool[source]))
    for index in range(_POOL, number):
        for target in range(_POOL):
            pool[target] = mixed(pool[target], hashed(words[:, index]))
    return np.stack(pool, axis=1)


@functools.cache
def _generator() -> tuple[np.random.RandomState, int]:
    """A generator, and where its state lies."""
    numbers = np.random.MT19937(0)
    return np.random.RandomState(numbers), numbers.ctypes.state_address


def _shuffled(key: Words, size: int) -> Indices:
    """A permutation by the generator with this state; NumPy's own setter takes longer than all."""
    generator, address = _generator()
    with _LOCK:
        ctypes.memmove(address, key.ctypes.data, 4 * _KEY)
        ctypes.c_int.from_address(address + 4 * _KEY).value = _KEY - 1
        return generator.permutation(size)


@functools.cache
def _works() -> bool:
    """Whether this NumPy keeps a generator's state where it is expected."""
    numbers = entropy(2**40 + 1, Purpose.BATCHES, 3, 5)
    keys = _keys(np.array([_words(numbers)], dtype=np.uint32))
    fresh = np.random.MT19937(np.random.SeedSequence(numbers))
    state = fresh.state["state"]
    if not np.array_equal(state["key"], keys[0]) or state["pos"] != _KEY - 1:
        return False
    address = fresh.ctypes.state_address
    held = np.ctypeslib.as_array((ctypes.c_uint32 * _KEY).from_address(address))
    position = ctypes.c_int.from_address(address + 4 * _KEY).value
    return np.array_equal(held, keys[0]) and position == _KEY - 1
