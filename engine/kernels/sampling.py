"""From rows of logits to tokens: what touches the whole vocabulary. ``engine/sampler.py`` says what the parameters mean.

A row is one thread's, from its first pass to its token, so nothing of it depends on the other rows. And no sum depends on its
order: a weight, e to the (score - largest) / temperature, is rounded to an integer, of so many bits that 64 hold the sum of the
vocabulary's. Shares move by at most 3.5e-10 that way in a vocabulary of 49,152, by 7.5e-9 in one of 262,144; what is less likely
than 2⁻⁴⁷ (2⁻⁴⁵) of the likeliest is never drawn.
"""

import math
from typing import Any

import numba
import numpy as np
import numpy.typing as npt

from engine.kernels.jit import F32, I32, I64, inline, kernel
from engine.kernels.likelihood import draw, least_key, unit, weigh, weight_of
from engine.kernels.philox import uniform
from engine.kernels.selection import (
    BLOCK,
    LOWEST,
    Scratch,
    collect,
    collect_largest,
    first_of,
    keep_at_least,
    keep_most_of,
    kth_largest,
    sum_of,
    survey,
    value_of,
)

NO_LOGPROBS = -1
NO_MASK = -1
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
        ("mask", "i8"),  # its row of ``masks``
    ]
)

F64 = npt.NDArray[np.float64]

_LOG2_E, _LN2 = math.log2(math.e), math.log(2.0)
_LARGEST_FLOAT = float(np.finfo(np.float32).max)
_HALF_WORD = np.uint64(0xFFFFFFFF)


@kernel(parallel=True)
def choose_rows(
    logits: F32,
    requests: npt.NDArray[np.void],
    history: I32,
    bias_ids: I32,
    biases: F64,
    masks: I32,
    tokens: I64,
    logprobs: F64,
    top_ids: I64,
    top_logprobs: F64,
    threads: int,
) -> None:
    """Sets ``tokens[row]`` for each row of ``logits`` [rows, vocab], which are not changed; ``INVALID`` where there is none.

    Of rows that want them, sets ``logprobs[row]`` and the first columns of ``top_ids`` and ``top_logprobs``, as many as wanted or
    as the vocabulary has. Ids of ``history`` and ``bias_ids`` that lie outside the vocabulary are passed over. Bit i % 32 of word
    i // 32 of a row of ``masks`` allows token i; what it has no bit for is forbidden.
    """
    rows, vocab = logits.shape
    blocks = (vocab + BLOCK - 1) // BLOCK
    for thread in numba.prange(threads):
        first, last = rows * thread // threads, rows * (thread + 1) // threads
        if first < last:
            scratch = Scratch(
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
                masked = request.mask != NO_MASK
                changed = masked or request.history_from < request.history_to or request.bias_from < request.bias_to
                scores = _adjusted(raw, request, history, bias_ids, biases, scratch) if changed else raw
                if masked:
                    _forbid(scores, masks[request.mask])
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
def _choose(scores: F32, request: Any, scratch: Scratch) -> tuple[int, int]:
    """The token, and the weight of the whole vocabulary where it had to be summed up, else 0."""
    bits = scores.view(np.int32)
    largest = survey(bits, scratch.maxima)
    if largest == LOWEST:
        return INVALID, 0
    vocab = len(scores)
    if request.temperature == 0.0:
        return first_of(bits, largest, scratch.maxima), 0
    shift = np.float64(value_of(largest))
    factor = min(_LOG2_E / request.temperature, 1e300)
    one = unit(vocab)
    drawn = uniform(request.seed, request.token_index)
    total = 0
    if 0 < request.top_k < vocab:
        count = collect_largest(bits, request.top_k, scratch)
    elif request.top_p < 1.0:
        # What weighs less than (1 - p) / n of the sum comes to less than 1 - p of it together: the set lies among the others.
        total = weigh(scores, shift, factor, one, scratch.sums)
        floor = (1.0 - request.top_p) * total / (one * vocab)
        count = collect(bits, least_key(floor, shift, factor), scratch)
    elif request.min_p > 0.0:
        count = collect(bits, least_key(request.min_p, shift, factor), scratch)
    else:
        total = weigh(scores, shift, factor, one, scratch.sums)
        return draw(scores, shift, factor, one, scratch.sums, _place(drawn, total)), total
    for i in range(count):
        scratch.weights[i] = weight_of(value_of(scratch.keys[i]), shift, factor, one)
    if request.top_p < 1.0:
        whole = total if total else sum_of(scratch.weights, count)
        count = keep_most_of(max(1, math.ceil(request.top_p * whole)), count, scratch)
    if request.min_p > 0.0:
        count = keep_at_least(scratch.weights, request.min_p * one, count, scratch.ids)
    at = _place(drawn, sum_of(scratch.weights, count))
    i = 0
    while at >= scratch.weights[i]:
        at -= scratch.weights[i]
        i += 1
    return scratch.ids[i], total


@inline
def _report(raw: F32, token: int, wanted: int, total: int, top_ids: I64, top_logprobs: F64, scratch: Scratch) -> float:
    """The token's logprob in the model's own distribution, NaN where that is none; fills the likeliest, lower id first among
    equals. ``total`` is the distribution's weight, or 0 to have it summed up."""
    bits = raw.view(np.int32)
    largest = survey(bits, scratch.maxima)
    if largest == LOWEST:
        return math.nan
    shift, one = np.float64(value_of(largest)), unit(len(raw))
    if total == 0:
        total = weigh(raw, shift, _LOG2_E, one, scratch.sums)
    normaliser = shift + math.log(total / one)
    wanted = min(wanted, len(raw))
    if wanted:
        count = collect_largest(bits, wanted, scratch)
        least = np.int32(kth_largest(scratch.keys, count, wanted))
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
def _adjusted(raw: F32, request: Any, history: I32, bias_ids: I32, biases: F64, scratch: Scratch) -> F32:
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
def _forbid(scores: F32, mask: I32) -> None:
    vocab = len(scores)
    for word in range((vocab + 31) // 32):
        bits = mask[word] if word < len(mask) else np.int32(0)
        first, end = 32 * word, min(32 * word + 32, vocab)
        if bits == 0:  # most words allow nothing or all
            scores[first:end] = -math.inf
        elif bits != -1:
            for i in range(first, end):
                if not (bits >> np.int32(i & 31)) & 1:
                    scores[i] = -math.inf


@inline
def _finite(score: float, before: np.float32) -> np.float32:
    """No parameter makes a score infinite, except by a bias of -inf."""
    return np.float32(_LARGEST_FLOAT if score > _LARGEST_FLOAT and before <= _LARGEST_FLOAT else score)


@inline
def _place(drawn: float, total: int) -> int:
    return min(int(drawn * total), total - 1)
