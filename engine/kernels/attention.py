"""Attention of generated rows over pages: each (row, kv head) alone, pages in page order."""

import numba
import numpy as np

from engine.kernels.activation import exp
from engine.kernels.jit import F32, I32, inline, kernel
from engine.kernels.vector import LANES, fma, make_dots, make_weighted_sums

_dots_4x4, _dots_1x4, _dots_4x1, _dots_1x1 = make_dots(4, 4), make_dots(1, 4), make_dots(4, 1), make_dots(1, 1)
_dots_3x4, _dots_2x4 = make_dots(3, 4), make_dots(2, 4)
_sums_4x4, _sums_3x4, _sums_2x4, _sums_1x4 = (make_weighted_sums(rows, 4) for rows in (4, 3, 2, 1))
_sums_1x1 = make_weighted_sums(1, 1)


@kernel(parallel=True)
def attend_rows(
    query: F32,
    key: F32,
    value: F32,
    pool: F32,
    layer: int,
    page_tables: I32,
    row_sequence: I32,
    positions: I32,
    scaling: np.float32,
    output: F32,
    threads: int,
) -> None:
    """Write each row's key and value into its slot, then let each row attend to its sequence's slots 0 .. its own position.

    ``query``, ``output`` [N, num_heads, head_dim]; ``key``, ``value`` [N, num_kv_heads, head_dim]; ``pool`` [num_pages,
    num_layers, 2, page_size, num_kv_heads, head_dim]; all float32 and C-contiguous. ``page_tables`` [S, max_pages],
    ``row_sequence`` [N] (which table), ``positions`` [N]. All keys are written before any row attends: rows of one sequence see
    those before them in the same call.
    """
    num_rows, num_heads, head_dim = query.shape
    num_kv_heads = key.shape[1]
    page_size = pool.shape[3]
    for row in range(num_rows):
        page = page_tables[row_sequence[row], positions[row] // page_size]
        slot = positions[row] % page_size
        for head in range(num_kv_heads):
            for d in range(head_dim):
                pool[page, layer, 0, slot, head, d] = key[row, head, d]
                pool[page, layer, 1, slot, head, d] = value[row, head, d]

    group = num_heads // num_kv_heads
    longest = 0
    for row in range(num_rows):
        longest = max(longest, positions[row] + 1)
    flat_query, flat_pool, flat_output = query.reshape(-1), pool.reshape(-1), output.reshape(-1)
    for thread in numba.prange(threads):
        weights = np.empty(group * longest, np.float32)
        # Dealt out in turn, not in stretches: neighbouring rows have the same long context.
        for item in range(thread, num_rows * num_kv_heads, threads):
            row, kv_head = item // num_kv_heads, item % num_kv_heads
            _attend(
                flat_query,
                flat_pool,
                pool.shape,
                layer,
                kv_head,
                page_tables[row_sequence[row]],
                positions[row] + 1,
                scaling,
                weights,
                flat_output,
                (row * num_heads + kv_head * group) * head_dim,
                group,
            )


@inline
def _attend(
    query: F32,
    pool: F32,
    shape: tuple[int, int, int, int, int, int],
    layer: int,
    kv_head: int,
    page_table: I32,
    length: int,
    scaling: np.float32,
    weights: F32,
    output: F32,
    at: int,
    group: int,
) -> None:
    """Softmax attention of the ``group`` query heads that share one kv head; ``at`` is where they begin in ``query`` and
    ``output``."""
    _, num_layers, _, page_size, num_kv_heads, head_dim = shape
    stride = num_kv_heads * head_dim
    keys = (layer * 2 * page_size) * stride + kv_head * head_dim
    page_extent = num_layers * 2 * page_size * stride
    num_pages = (length + page_size - 1) // page_size

    for index in range(num_pages):
        first = index * page_size
        _scores(
            query,
            at,
            pool,
            page_table[index] * page_extent + keys,
            stride,
            head_dim,
            min(page_size, length - first),
            weights,
            first,
            length,
            group,
        )
    for head in range(group):
        _softmax(weights, head * length, length, scaling)
    for i in range(at, at + group * head_dim):
        output[i] = np.float32(0.0)
    for index in range(num_pages):
        first = index * page_size
        values = page_table[index] * page_extent + keys + page_size * stride
        _mix(weights, first, length, pool, values, stride, min(page_size, length - first), output, at, head_dim, group)


@inline
def _scores(
    q: F32, q_at: int, k: F32, k_at: int, stride: int, dim: int, count: int, y: F32, first: int, length: int, group: int
) -> None:
    """``y[head * length + first + slot]`` = query head · key slot, for one page."""
    slot = 0
    while slot + 4 <= count:
        head = 0
        while head + 4 <= group:
            _dots_4x4(q, q_at + head * dim, dim, k, k_at + slot * stride, stride, dim, y, head * length + first + slot, length)
            head += 4
        if group - head == 3:
            _dots_3x4(q, q_at + head * dim, dim, k, k_at + slot * stride, stride, dim, y, head * length + first + slot, length)
        elif group - head == 2:
            _dots_2x4(q, q_at + head * dim, dim, k, k_at + slot * stride, stride, dim, y, head * length + first + slot, length)
        elif group - head == 1:
            _dots_1x4(q, q_at + head * dim, dim, k, k_at + slot * stride, stride, dim, y, head * length + first + slot, length)
        slot += 4
    while slot < count:
        for head in range(group):
            _dots_1x1(q, q_at + head * dim, dim, k, k_at + slot * stride, stride, dim, y, head * length + first + slot, length)
        slot += 1


@inline
def _softmax(weights: F32, at: int, length: int, scaling: np.float32) -> None:
    """In place, over ``weights[at : at + length] * scaling``. The sum is taken in four lanes."""
    largest = np.float32(-np.inf)
    for i in range(at, at + length):
        scaled = weights[i] * scaling
        weights[i] = scaled
        largest = max(largest, scaled)
    for i in range(at, at + length):
        weights[i] = exp(weights[i] - largest)
    s0 = s1 = s2 = s3 = np.float32(0.0)
    whole = at + (length & ~3)
    for i in range(at, whole, 4):
        s0 += weights[i]
        s1 += weights[i + 1]
        s2 += weights[i + 2]
        s3 += weights[i + 3]
    total = (s0 + s1) + (s2 + s3)
    for i in range(whole, at + length):
        total += weights[i]
    inverse = np.float32(1.0) / total
    for i in range(at, at + length):
        weights[i] *= inverse


@inline
def _mix(
    p: F32, first: int, length: int, v: F32, v_at: int, stride: int, count: int, y: F32, y_at: int, dim: int, group: int
) -> None:
    """Add one page's values, weighted, to the output of each head; slots in order."""
    head = 0
    while head < group:
        together = min(4, group - head)
        p_at, at = head * length + first, y_at + head * dim
        d = 0
        while d + 4 * LANES <= dim:
            if together == 4:
                _sums_4x4(p, p_at, length, v, v_at + d, stride, count, y, at + d, dim)
            elif together == 3:
                _sums_3x4(p, p_at, length, v, v_at + d, stride, count, y, at + d, dim)
            elif together == 2:
                _sums_2x4(p, p_at, length, v, v_at + d, stride, count, y, at + d, dim)
            else:
                _sums_1x4(p, p_at, length, v, v_at + d, stride, count, y, at + d, dim)
            d += 4 * LANES
        for h in range(together):
            rest = d
            while rest + LANES <= dim:
                _sums_1x1(p, p_at + h * length, length, v, v_at + rest, stride, count, y, at + h * dim + rest, dim)
                rest += LANES
            while rest < dim:
                total = y[at + h * dim + rest]
                for slot in range(count):
                    total = fma(p[p_at + h * length + slot], v[v_at + slot * stride + rest], total)
                y[at + h * dim + rest] = total
                rest += 1
        head += together
