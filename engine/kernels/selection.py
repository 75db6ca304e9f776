"""The largest of a vocabulary's scores, compared as integers, whose maximum can be vectorised without fast-math.

The maxima of blocks of ``BLOCK`` scores, a by-product of the first pass, let most blocks be passed over.
"""

from typing import Any, NamedTuple

import numpy as np

from engine.kernels.elementwise import float_from_bits
from engine.kernels.jit import F32, I32, I64, inline

BLOCK = 128
LOWEST = np.int32(-(2**31))
_INFINITY = np.int32(0x7F800000)
_MAGNITUDE = np.int32(0x7FFFFFFF)
_NONE = np.uint64(0)  # counters that index are unsigned: numba wraps the others around, which costs as much as the rest


class Scratch(NamedTuple):
    """One thread's. A list of tokens is the first so many ``ids``, ascending, with their ``keys`` and ``weights``."""

    scores: F32  #: a row that penalties or biases changed
    counts: I32  #: all 0 between rows
    maxima: I32  #: largest key of each block
    sums: I64  #: weight of each block
    ids: I32
    keys: I32
    weights: I64


@inline
def key_of(bits: np.int32) -> np.int32:
    """An integer in the order of the float with these bits; the same for both zeros."""
    return bits if bits >= 0 else np.int32(LOWEST - bits)


@inline
def value_of(key: np.int32) -> np.float32:
    value: np.float32 = float_from_bits(key_of(key))
    return value  # ``key_of`` is its own inverse


@inline
def survey(bits: I32, maxima: I32) -> np.int32:
    """Largest key of each block into ``maxima``; the largest of all, or ``LOWEST`` when there is NaN or no finite maximum."""
    vocab = len(bits)
    largest, magnitude = LOWEST, np.int32(0)
    for block in range(len(maxima)):
        at, here, there = block * BLOCK, LOWEST, np.int32(0)
        for i in range(min(BLOCK, vocab - at)):
            here = max(here, key_of(bits[at + i]))
            there = max(there, np.int32(bits[at + i] & _MAGNITUDE))
        maxima[block] = here
        largest, magnitude = max(largest, here), max(magnitude, there)
    return LOWEST if magnitude > _INFINITY or abs(largest) == _INFINITY else largest


@inline
def first_of(bits: I32, key: np.int32, maxima: I32) -> int:
    block = 0
    while maxima[block] != key:
        block += 1
    i = block * BLOCK
    while key_of(bits[i]) != key:
        i += 1
    return i


@inline
def collect(bits: I32, least: int | np.int32, scratch: Scratch) -> int:
    """List the tokens whose key is at least ``least``; how many they are."""
    bound, count = np.int32(least), _NONE
    for block in range(len(scratch.maxima)):
        if scratch.maxima[block] >= bound:
            at = block * BLOCK
            for i in range(min(BLOCK, len(bits) - at)):
                key = key_of(bits[at + i])
                scratch.ids[count], scratch.keys[count] = at + i, key
                count += np.uint64(key >= bound)
    return int(np.int64(count))


@inline
def collect_largest(bits: I32, k: int, scratch: Scratch) -> int:
    """List the k tokens of largest key and all that equal the k-th; how many they are."""
    blocks = len(scratch.maxima)
    # k blocks hold k tokens at least as large as the smallest of the blocks' maxima.
    count = collect(bits, kth_largest(scratch.maxima, blocks, k) if k <= blocks else LOWEST, scratch)
    return keep_at_least(scratch.keys, np.int32(kth_largest(scratch.keys, count, k)), count, scratch.ids)


@inline
def kth_largest(keys: I32, count: int, k: int) -> int:
    """By bisection: counting is vectorised, and a few dozen rounds are enough for every input."""
    low, high = _bounds(keys, count)
    while high - low > 1:
        middle = (low + high) >> 1
        bound, reached = np.int32(middle), np.int32(0)
        for i in range(count):
            reached = np.int32(reached + np.int32(keys[i] >= bound))
        if reached >= k:
            low = middle
        else:
            high = middle
    return low


@inline
def keep_most_of(target: int, count: int, scratch: Scratch) -> int:
    """Keep the fewest of the heaviest that weigh ``target`` together, lower id first among equals; how many they are."""
    keys, weights = scratch.keys, scratch.weights
    if sum_of(weights, count) < target:
        return count
    low, high = _bounds(keys, count)
    heavier = 0  # weight of the keys from ``high`` on
    while high - low > 1:
        middle = (low + high) >> 1
        bound, reached = np.int32(middle), 0
        for i in range(count):
            reached += weights[i] if keys[i] >= bound else 0
        if reached >= target:
            low = middle
        else:
            high, heavier = middle, reached
    kept = _NONE
    for i in range(count):
        key, weight = keys[i], weights[i]
        scratch.ids[kept], weights[kept] = scratch.ids[i], weight
        if key > low:
            kept += np.uint64(1)
        elif key == low and heavier < target:
            heavier += weight
            kept += np.uint64(1)
    return int(np.int64(kept))


@inline
def keep_at_least(values: I32 | I64, least: Any, count: int, ids: I32) -> int:
    """Move what is at least ``least`` of ``values[:count]`` to the front, ids with it; how many that are."""
    kept = _NONE
    for i in range(count):
        value = values[i]
        ids[kept], values[kept] = ids[i], value
        kept += np.uint64(value >= least)
    return int(np.int64(kept))


@inline
def _bounds(keys: I32, count: int) -> tuple[int, int]:
    """The smallest key, and one above the largest."""
    low, high = np.int32(keys[0]), np.int32(keys[0])
    for i in range(count):
        low, high = min(low, keys[i]), max(high, keys[i])
    return int(np.int64(low)), int(np.int64(high)) + 1


@inline
def sum_of(weights: I64, count: int) -> int:
    total = 0
    for i in range(count):
        total += weights[i]
    return total
