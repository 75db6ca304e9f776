"""From rows of logits to tokens: what touches the whole vocabulary. ``engine/sampler.py`` says what the parameters mean.

A row is one thread's, from its first pass to its token, so nothing of it depends on the other rows. And no sum depends on its
order: a weight, e to the (score - largest) / temperature, is rounded to an integer, of so many bits that 64 hold the sum of the
vocabulary's. Shares move by at most 3.5e-10 that way in a vocabulary of 49,152, by 7.5e-9 in one of 262,144; what is less likely
than 2⁻⁴⁷ (2⁻⁴⁵) of the likeliest is never drawn.

Scores are compared as integers too (``_key``), since the maximum of integers can be vectorised without fast-math. The maxima of
blocks of ``BLOCK`` scores, a by-product of the first pass, let most of the blocks be passed over when the largest are wanted.
"""

import math
from typing import Any, NamedTuple

import numba
import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from engine.kernels.elementwise import float_from_bits
from engine.kernels.jit import F32, I32, inline, kernel

BLOCK = 128
NO_LOGPROBS = -1
INVALID = -1  #: the token of a row from which none can be chosen

#: One row's parameters. Its history is ``history[history_from:history_to]``, the prompt up to ``generated_from``.
REQUEST = np.dtype(
    [
        ("temperature", "f8"),
        ("top_p", "f8"),
        ("min_p", "f8"),
        ("repetition_penalty", "f8"),
        ("presence_penalty", "f8"),
        ("frequency_penalty", "f8"),
        ("seed", "u8"),
        ("token_index", "u8"),
        ("top_k", "i8"),
        ("logprobs", "i8"),
        ("history_from", "i8"),
        ("generated_from", "i8"),
        ("history_to", "i8"),
        ("bias_from", "i8"),
        ("bias_to", "i8"),
    ]
)

I64 = npt.NDArray[np.int64]
F64 = npt.NDArray[np.float64]

_LOG2_E, _LN2 = math.log2(math.e), math.log(2.0)
_LEAST_EXPONENT = -64.0  # every weight below is 0
_ROUND = 1.5 * 2.0**52  # adding it rounds to an integer in the low bits
_ROUND_BITS = int(np.float64(_ROUND).view(np.int64))
_INFINITY = np.int32(0x7F800000)
_LOWEST = np.int32(-(2**31))
_MAGNITUDE = np.int32(0x7FFFFFFF)
_LARGEST_FLOAT = float(np.finfo(np.float32).max)
_C = tuple(_LN2**k / math.factorial(k) for k in range(12))  # Taylor's series of 2 to the x: within 1e-14 for |x| ≤ 0.5
_NONE = np.uint64(0)  # counters that index are unsigned: numba wraps the others around, which costs as much as the rest
_HALF_WORD = np.uint64(0xFFFFFFFF)


class _Scratch(NamedTuple):
    """One thread's. A list of tokens is the first so many ``ids``, ascending, with their ``keys`` and ``weights``."""

    scores: F32  #: a row that penalties or biases changed
    counts: I32  #: all 0 between rows
    maxima: I32  #: largest key of each block
    sums: I64  #: weight of each block
    ids: I32
    keys: I32
    weights: I64


@intrinsic  # type: ignore[untyped-decorator]
def _bits_of(typing: Any, value: Any) -> Any:
    """The bits of a float32 as int32, of a float64 as int64."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], context.get_value_type(signature.return_type))

    return (types.int32 if value == types.float32 else types.int64)(value), generate


@intrinsic  # type: ignore[untyped-decorator]
def _double_from_bits(typing: Any, bits: Any) -> Any:
    """The float64 whose bits are the given int64."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.DoubleType())

    return types.float64(types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def _fma(typing: Any, a: Any, b: Any, c: Any) -> Any:
    """a · b + c, rounded once, in float64."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.fma(*args)

    return types.float64(types.float64, types.float64, types.float64), generate


@kernel(parallel=True)
def choose_rows(
    logits: F32,
    requests: npt.NDArray[np.void],
    history: I32,
    bias_ids: I32,
    biases: F64,
    tokens: I64,
    logprobs: F64,
    top_ids: I64,
    top_logprobs: F64,
    threads: int,
) -> None:
    """Sets ``tokens[row]`` for each row of ``logits`` [rows, vocab], which are not changed; ``INVALID`` where there is none.

    Of rows that want them, sets ``logprobs[row]`` and the first columns of ``top_ids`` and ``top_logprobs``, as many as wanted or
    as the vocabulary has. Ids of ``history`` and ``bias_ids`` that lie outside the vocabulary are passed over.
    """
    rows, vocab = logits.shape
    blocks = (vocab + BLOCK - 1) // BLOCK
    for thread in numba.prange(threads):
        first, last = rows * thread // threads, rows * (thread + 1) // threads
        if first < last:
            scratch = _Scratch(
                np.empty(vocab, np.float32),
                np.zeros(vocab if history.size else 0, np.int32),
                np.empty(blocks, np.int32),
                np.empty(blocks, np.int64),
                np.empty(vocab, np.int32),
                np.empty(vocab, np.int32),
                np.empty(vocab, np.int64),
            )
            for row in range(first, last):
                request = requests[row]
                raw = logits[row]
                changed = request.history_from < request.history_to or request.bias_from < request.bias_to
                scores = _adjusted(raw, request, history, bias_ids, biases, scratch) if changed else raw
                token, total = _choose(scores, request, scratch)
                if token >= 0 and request.logprobs >= 0:
                    # At temperature 1, where nothing changed the scores, the draw has summed up the model's own distribution.
                    own = request.temperature == 1.0 and not changed
                    logprob = _report(raw, token, request.logprobs, total if own else 0, top_ids[row], top_logprobs[row], scratch)
                    logprobs[row] = logprob
                    if math.isnan(logprob):
                        token = INVALID
                tokens[row] = token


@inline
def _choose(scores: F32, request: Any, scratch: _Scratch) -> tuple[int, int]:
    """The token, and the weight of the whole vocabulary where it had to be summed up, else 0."""
    bits = scores.view(np.int32)
    largest = _survey(bits, scratch.maxima)
    if largest == _LOWEST:
        return INVALID, 0
    vocab = len(scores)
    if request.temperature == 0.0:
        return _first_of(bits, largest, scratch.maxima), 0
    shift = np.float64(_value(largest))
    factor = min(_LOG2_E / request.temperature, 1e300)
    one = _one(vocab)
    drawn = uniform(request.seed, request.token_index)
    total = 0
    if 0 < request.top_k < vocab:
        count = _collect_largest(bits, request.top_k, scratch)
    elif request.top_p < 1.0:
        # What weighs less than (1 - p) / n of the sum comes to less than 1 - p of it together: the set lies among the others.
        total = _weigh(scores, shift, factor, one, scratch.sums)
        floor = (1.0 - request.top_p) * total / (one * vocab)
        count = _collect(bits, _least_key(floor, shift, factor), scratch)
    elif request.min_p > 0.0:
        count = _collect(bits, _least_key(request.min_p, shift, factor), scratch)
    else:
        total = _weigh(scores, shift, factor, one, scratch.sums)
        return _draw(scores, shift, factor, one, scratch.sums, _place(drawn, total)), total
    for i in range(count):
        scratch.weights[i] = _weight(_value(scratch.keys[i]), shift, factor, one)
    if request.top_p < 1.0:
        whole = total if total else _sum(scratch.weights, count)
        count = _keep_most_of(max(1, math.ceil(request.top_p * whole)), count, scratch)
    if request.min_p > 0.0:
        count = _keep_heavier(request.min_p * one, count, scratch)
    at = _place(drawn, _sum(scratch.weights, count))
    i = 0
    while at >= scratch.weights[i]:
        at -= scratch.weights[i]
        i += 1
    return scratch.ids[i], total


@inline
def _report(raw: F32, token: int, wanted: int, total: int, top_ids: I64, top_logprobs: F64, scratch: _Scratch) -> float:
    """The token's logprob in the model's own distribution, NaN where that is none; fills the likeliest, lower id first among
    equals. ``total`` is the distribution's weight, or 0 to have it summed up."""
    bits = raw.view(np.int32)
    largest = _survey(bits, scratch.maxima)
    if largest == _LOWEST:
        return math.nan
    shift, one = np.float64(_value(largest)), _one(len(raw))
    if total == 0:
        total = _weigh(raw, shift, _LOG2_E, one, scratch.sums)
    normaliser = shift + math.log(total / one)
    wanted = min(wanted, len(raw))
    if wanted:
        count = _collect_largest(bits, wanted, scratch)
        least = np.int32(_kth_largest(scratch.keys, count, wanted))
        ties = wanted  # so many of those that equal the last
        for i in range(count):
            ties -= scratch.keys[i] > least
        found = 0
        for i in range(count):
            key = scratch.keys[i]
            if key == least:
                ties -= 1
            if key > least or ties >= 0:
                at = found
                while at > 0 and raw[top_ids[at - 1]] < raw[scratch.ids[i]]:
                    top_ids[at] = top_ids[at - 1]
                    at -= 1
                top_ids[at] = scratch.ids[i]
                found += 1
        for i in range(wanted):
            top_logprobs[i] = raw[top_ids[i]] - normaliser
    return np.float64(raw[token]) - normaliser


@inline
def _adjusted(raw: F32, request: Any, history: I32, bias_ids: I32, biases: F64, scratch: _Scratch) -> F32:
    """A copy with penalties and biases: each in float64, then rounded."""
    scores, counts = scratch.scores, scratch.counts
    vocab = len(raw)
    for i in range(vocab):  # as a slice it would compile for two seconds more
        scores[i] = raw[i]
    for i in range(request.generated_from, request.history_to):
        if 0 <= history[i] < vocab:
            counts[history[i]] += 1
    for i in range(request.history_from, request.history_to):
        token = history[i]
        if 0 <= token < vocab and counts[token] >= 0:
            score = np.float64(scores[token])
            if request.repetition_penalty != 1.0:
                score = score / request.repetition_penalty if score > 0 else score * request.repetition_penalty
            if counts[token]:
                score -= request.frequency_penalty * counts[token] + request.presence_penalty
            scores[token] = _finite(score, scores[token])
            counts[token] = -1  # done
    for i in range(request.history_from, request.history_to):
        if 0 <= history[i] < vocab:
            counts[history[i]] = 0
    for i in range(request.bias_from, request.bias_to):
        token = bias_ids[i]
        if 0 <= token < vocab:
            scores[token] = _finite(scores[token] + biases[i], scores[token])
    return scores


@inline
def _finite(score: float, before: np.float32) -> np.float32:
    """No parameter makes a score infinite, except by a bias of -inf."""
    return np.float32(_LARGEST_FLOAT if score > _LARGEST_FLOAT and before <= _LARGEST_FLOAT else score)


@inline
def _key(bits: np.int32) -> np.int32:
    """An integer in the order of the float with these bits; the same for both zeros."""
    return bits if bits >= 0 else np.int32(_LOWEST - bits)


@inline
def _value(key: np.int32) -> np.float32:
    value: np.float32 = float_from_bits(_key(key))
    return value  # ``_key`` is its own inverse


@inline
def _survey(bits: I32, maxima: I32) -> np.int32:
    """Largest key of each block into ``maxima``; the largest of all, or ``_LOWEST`` when there is NaN or no finite maximum."""
    vocab = len(bits)
    largest, magnitude = _LOWEST, np.int32(0)
    for block in range(len(maxima)):
        at, here, there = block * BLOCK, _LOWEST, np.int32(0)
        for i in range(min(BLOCK, vocab - at)):
            here = max(here, _key(bits[at + i]))
            there = max(there, np.int32(bits[at + i] & _MAGNITUDE))
        maxima[block] = here
        largest, magnitude = max(largest, here), max(magnitude, there)
    return _LOWEST if magnitude > _INFINITY or abs(largest) == _INFINITY else largest


@inline
def _first_of(bits: I32, key: np.int32, maxima: I32) -> int:
    block = 0
    while maxima[block] != key:
        block += 1
    i = block * BLOCK
    while _key(bits[i]) != key:
        i += 1
    return i


@inline
def _collect(bits: I32, least: int | np.int32, scratch: _Scratch) -> int:
    """List the tokens whose key is at least ``least``; how many they are."""
    bound, count = np.int32(least), _NONE
    for block in range(len(scratch.maxima)):
        if scratch.maxima[block] >= bound:
            at = block * BLOCK
            for i in range(min(BLOCK, len(bits) - at)):
                key = _key(bits[at + i])
                scratch.ids[count], scratch.keys[count] = at + i, key
                count += np.uint64(key >= bound)
    return int(np.int64(count))


@inline
def _collect_largest(bits: I32, k: int, scratch: _Scratch) -> int:
    """List the k tokens of largest key and all that equal the k-th; how many they are."""
    blocks = len(scratch.maxima)
    # k blocks hold k tokens at least as large as the smallest of the blocks' maxima.
    count = _collect(bits, _kth_largest(scratch.maxima, blocks, k) if k <= blocks else _LOWEST, scratch)
    least, kept = np.int32(_kth_largest(scratch.keys, count, k)), _NONE
    for i in range(count):
        key = scratch.keys[i]
        scratch.ids[kept], scratch.keys[kept] = scratch.ids[i], key
        kept += np.uint64(key >= least)
    return int(np.int64(kept))


@inline
def _kth_largest(keys: I32, count: int, k: int) -> int:
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
def _keep_most_of(target: int, count: int, scratch: _Scratch) -> int:
    """Keep the fewest of the heaviest that weigh ``target`` together, lower id first among equals; how many they are."""
    keys, weights = scratch.keys, scratch.weights
    if _sum(weights, count) < target:
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
def _keep_heavier(least: float, count: int, scratch: _Scratch) -> int:
    kept = _NONE
    for i in range(count):
        weight = scratch.weights[i]
        scratch.ids[kept], scratch.weights[kept] = scratch.ids[i], weight
        kept += np.uint64(weight >= least)
    return int(np.int64(kept))


@inline
def _bounds(keys: I32, count: int) -> tuple[int, int]:
    """The smallest key, and one above the largest."""
    low, high = np.int32(keys[0]), np.int32(keys[0])
    for i in range(count):
        low, high = min(low, keys[i]), max(high, keys[i])
    return int(np.int64(low)), int(np.int64(high)) + 1


@inline
def _one(vocab: int) -> float:
    """The weight of the likeliest token: the largest power of 2 with which 2⁶² holds the sum of the vocabulary's, up to 2⁵⁰."""
    exponent = 50
    while vocab > 1 << (62 - exponent):
        exponent -= 1
    return float(1 << exponent)


@inline
def _weight(score: np.float32, shift: float, factor: float, one: float) -> int:
    """2 to the (score - shift) · factor, in units of 1 / ``one``, rounded."""
    exponent = max((np.float64(score) - shift) * factor, _LEAST_EXPONENT)
    rounded = exponent + _ROUND
    x = exponent - (rounded - _ROUND)
    p = _fma(_C[11], x, _C[10])
    p = _fma(p, x, _C[9])
    p = _fma(p, x, _C[8])
    p = _fma(p, x, _C[7])
    p = _fma(p, x, _C[6])
    p = _fma(p, x, _C[5])
    p = _fma(p, x, _C[4])
    p = _fma(p, x, _C[3])
    p = _fma(p, x, _C[2])
    p = _fma(p, x, _C[1])
    p = _fma(p, x, _C[0])
    power = _double_from_bits((_bits_of(rounded) - _ROUND_BITS + 1023) << 52)
    weight: int = _bits_of(_fma(p * power, one, _ROUND)) - _ROUND_BITS
    return weight


@inline
def _weigh(scores: F32, shift: float, factor: float, one: float, sums: I64) -> int:
    """Weight of each block into ``sums``; of all."""
    total = 0
    for block in range(len(sums)):
        at, here = block * BLOCK, 0
        for i in range(min(BLOCK, len(scores) - at)):
            here += _weight(scores[at + i], shift, factor, one)
        sums[block] = here
        total += here
    return total


@inline
def _sum(weights: I64, count: int) -> int:
    total = 0
    for i in range(count):
        total += weights[i]
    return total


@inline
def _least_key(weight: float, shift: float, factor: float) -> int:
    """A key that no token of at least this weight (the likeliest's is 1) lies below, though rounding were against it."""
    return int(np.int64(_key(_bits_of(np.float32(shift + math.log2(0.999 * weight) / factor))))) - 1


@inline
def _place(drawn: float, total: int) -> int:
    return min(int(drawn * total), total - 1)


@inline
def _draw(scores: F32, shift: float, factor: float, one: float, sums: I64, at: int) -> int:
    """The token in whose share of the weights, laid out in the order of the ids, ``at`` lies."""
    block = 0
    while at >= sums[block]:
        at -= sums[block]
        block += 1
    i = block * BLOCK
    weight = _weight(scores[i], shift, factor, one)
    while at >= weight:
        at -= weight
        i += 1
        weight = _weight(scores[i], shift, factor, one)
    return i


@inline
def uniform(seed: np.uint64, token_index: np.uint64) -> float:
    """The random number in [0, 1) of one token: the top 53 bits of numpy's first word of Philox-4x64 for key ``seed``, counter
    ``token_index``."""
    key0, key1 = np.uint64(seed), np.uint64(0)
    a, b, c, d = np.uint64(token_index + np.uint64(1)), np.uint64(0), np.uint64(0), np.uint64(0)  # numpy counts, then draws
    for _ in range(10):
        high0, low0 = _multiply(np.uint64(0xD2E7470EE14C6C93), a)
        high1, low1 = _multiply(np.uint64(0xCA5A826395121157), c)
        a, b, c, d = high1 ^ b ^ key0, low1, high0 ^ d ^ key1, low0
        key0 = np.uint64(key0 + np.uint64(0x9E3779B97F4A7C15))
        key1 = np.uint64(key1 + np.uint64(0xBB67AE8584CAA73B))
    return float(a >> np.uint64(11)) * 2.0**-53


@inline
def _multiply(a: np.uint64, b: np.uint64) -> tuple[np.uint64, np.uint64]:
    """High and low word of the product."""
    half = np.uint64(32)
    a0, a1, b0, b1 = a & _HALF_WORD, a >> half, b & _HALF_WORD, b >> half
    middle = a1 * b0 + ((a0 * b0) >> half)
    crossed = a0 * b1 + (middle & _HALF_WORD)
    return a1 * b1 + (middle >> half) + (crossed >> half), a * b
