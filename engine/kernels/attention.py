"""Attention of generated rows over pages: each (row, kv head) alone, pages in page order."""

from typing import Any

import numba
import numpy as np
import numpy.typing as npt

from engine.kernels.activation import exp
from engine.kernels.jit import F32, I32, inline, kernel
from engine.kernels.vector import LANES, fma, load_element, make_dots, make_weighted_sums, store_element, take

Pool = npt.NDArray[Any]
"""[num_pages, num_layers, 2, page_size, num_kv_heads, head_dim] of float32, uint16 (bfloat16) or int16 (float16)."""

_dots_4x4, _dots_1x4, _dots_4x1, _dots_1x1 = make_dots(4, 4), make_dots(1, 4), make_dots(4, 1), make_dots(1, 1)
_dots_3x4, _dots_2x4 = make_dots(3, 4), make_dots(2, 4)
_sums_4x4, _sums_3x4, _sums_2x4, _sums_1x4 = (make_weighted_sums(rows, 4) for rows in (4, 3, 2, 1))
_sums_1x1 = make_weighted_sums(1, 1)


@kernel()
def attend_rows(
    query: F32,
    key: F32,
    value: F32,
    pool: Pool,
    layer: int,
    page_tables: I32,
    row_sequence: I32,
    positions: I32,
    scaling: np.float32,
    output: F32,
    threads: int,
) -> None:
    """Write each row's key and value into its slot, then let each row attend to its sequence's slots 0 .. its own position.

    ``query``, ``output`` [N, num_heads, head_dim]; ``key``, ``value`` [N, num_kv_heads, head_dim], float32; ``pool`` [num_pages,
    num_layers, 2, page_size, num_kv_heads, head_dim] of float32, uint16 (bfloat16) or int16 (float16); all C-contiguous.
    ``page_tables`` [S, max_pages], ``row_sequence`` [N] (which table), ``positions`` [N]. All keys are written before any row
    attends: rows of one sequence see those before them in the same call.
    """
    num_rows, num_heads, head_dim = query.shape
    flat_pool, flat_key, flat_value = pool.reshape(-1), key.reshape(-1), value.reshape(-1)
    width = key.shape[1] * head_dim
    for row in range(num_rows):
        at = slot_offset(pool.shape, layer, page_tables[row_sequence[row]], positions[row])
        for i in range(width):
            store_element(flat_pool, at + i, flat_key[row * width + i])
            store_element(flat_pool, at + pool.shape[3] * width + i, flat_value[row * width + i])
    attend(query.reshape(-1), num_heads, pool, layer, page_tables, row_sequence, positions, scaling, output.reshape(-1), threads)


@inline
def slot_offset(shape: tuple[int, int, int, int, int, int], layer: int, page_table: I32, position: int) -> int:
    """Where a position's keys begin in the flat pool; its values are ``page_size * num_kv_heads * head_dim`` further on."""
    _, num_layers, _, page_size, num_kv_heads, head_dim = shape
    page, slot = page_table[position // page_size], position % page_size
    offset: int = ((page * num_layers + layer) * 2 * page_size + slot) * num_kv_heads * head_dim
    return offset


@kernel(parallel=True)
def attend(
    query: F32,
    num_heads: int,
    pool: Pool,
    layer: int,
    page_tables: I32,
    row_sequence: I32,
    positions: I32,
    scaling: np.float32,
    output: F32,
    threads: int,
) -> None:
    """Each row over its sequence's slots 0 .. its own position, which are all written; see ``attend_rows``. ``query`` and
    ``output`` are flat [N, num_heads, head_dim]."""
    num_rows, num_kv_heads, head_dim = positions.size, pool.shape[4], pool.shape[5]
    group = num_heads // num_kv_heads
    longest = 0
    for row in range(num_rows):
        longest = max(longest, positions[row] + 1)
    flat_pool = pool.reshape(-1)
    # A row's heads lie side by side in each slot: one thread reads them together, unless rows are fewer than threads.
    heads_each = num_kv_heads if num_rows >= threads else 1
    items_each = num_kv_heads // heads_each
    counter = np.zeros(1, np.int64)
    for _ in numba.prange(threads):
        weights = np.empty(heads_each * group * longest, np.float32)
        item = take(counter, 0)
        while item < num_rows * items_each:
            row, first_head = item // items_each, item % items_each * heads_each
            _attend(
                query,
                flat_pool,
                pool.shape,
                layer,
                first_head,
                heads_each,
                page_tables[row_sequence[row]],
                positions[row] + 1,
                scaling,
                weights,
                output,
                (row * num_heads + first_head * group) * head_dim,
                group,
            )
            item = take(counter, 0)


@inline
def _attend(
    query: F32,
    pool: Pool,
    shape: tuple[int, int, int, int, int, int],
    layer: int,
    first_head: int,
    num_heads: int,
    page_table: I32,
    length: int,
    scaling: np.float32,
    weights: F32,
    output: F32,
    at: int,
    group: int,
) -> None:
    """Softmax attention of the query heads that share kv heads ``first_head ..``, ``group`` to each; ``at`` is where they begin in
    ``query`` and ``output``. Heads do not touch each other's sums: together they only read memory in order."""
    _, _, _, page_size, num_kv_heads, head_dim = shape
    stride = num_kv_heads * head_dim
    num_pages = (length + page_size - 1) // page_size
    for index in range(num_pages):
        first = index * page_size
        keys = slot_offset(shape, layer, page_table, first) + first_head * head_dim
        count = min(page_size, length - first)
        for head in range(num_heads):
            heads = head * group
            _scores(
                query,
                at + heads * head_dim,
                pool,
                keys + head * head_dim,
                stride,
                head_dim,
                count,
                weights,
                heads * length + first,
                length,
                group,
            )
    for head in range(num_heads * group):
        _softmax(weights, head * length, length, scaling)
    for i in range(at, at + num_heads * group * head_dim):
        output[i] = np.float32(0.0)
    for index in range(num_pages):
        first = index * page_size
        values = slot_offset(shape, layer, page_table, first) + page_size * stride + first_head * head_dim
        count = min(page_size, length - first)
        for head in range(num_heads):
            heads = head * group
            _mix(
                weights,
                heads * length + first,
                length,
                pool,
                values + head * head_dim,
                stride,
                count,
                output,
                at + heads * head_dim,
                head_dim,
                group,
            )


@inline
def _scores(
    q: F32, q_at: int, k: Pool, k_at: int, stride: int, dim: int, count: int, y: F32, y_at: int, length: int, group: int
) -> None:
    """``y[y_at + head * length + slot]`` = query head · key slot, for one page."""
    slot = 0
    while slot + 4 <= count:
        head = 0
        while head + 4 <= group:
            _dots_4x4(q, q_at + head * dim, dim, k, k_at + slot * stride, stride, dim, y, y_at + head * length + slot, length)
            head += 4
        if group - head == 3:
            _dots_3x4(q, q_at + head * dim, dim, k, k_at + slot * stride, stride, dim, y, y_at + head * length + slot, length)
        elif group - head == 2:
            _dots_2x4(q, q_at + head * dim, dim, k, k_at + slot * stride, stride, dim, y, y_at + head * length + slot, length)
        elif group - head == 1:
            _dots_1x4(q, q_at + head * dim, dim, k, k_at + slot * stride, stride, dim, y, y_at + head * length + slot, length)
        slot += 4
    while slot < count:
        for head in range(group):
            _dots_1x1(q, q_at + head * dim, dim, k, k_at + slot * stride, stride, dim, y, y_at + head * length + slot, length)
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
    p: F32, p_first: int, length: int, v: Pool, v_at: int, stride: int, count: int, y: F32, y_at: int, dim: int, group: int
) -> None:
    """Add one page's values, weighted, to the output of each head; slots in order."""
    head = 0
    while head < group:
        together = min(4, group - head)
        p_at, at = p_first + head * length, y_at + head * dim
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
                    total = fma(p[p_at + h * length + slot], load_element(v, v_at + slot * stride + rest), total)
                y[at + h * dim + rest] = total
                rest += 1
        head += together
