"""Attention of generated rows over pages: each (row, kv head) alone, pages in page order."""

from typing import Any

import numba
import numpy as np
import numpy.typing as npt

from engine.kernels.elementwise import (
    exp,
    exp_all,
    fma,
    largest,
    load_element,
    multiply_all,
    prefetch,
    store_element,
    total,
    widen_all,
)
from engine.kernels.jit import F32, I32, I64, inline, kernel
from engine.kernels.llvm import LANES
from engine.kernels.team import CELLS, done, take, wait
from engine.kernels.vector import make_dots, make_weighted_sums

_SLOTS = LANES  #: slots of a row's sequence that are read together
_TOGETHER = 8  #: rows of a run

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
    flat_pool, shape = pool.reshape(-1), pool.shape
    where = page_tables, row_sequence, positions, find_runs(row_sequence, positions)
    cells = np.zeros(CELLS, np.int64)
    for _ in numba.prange(threads):
        scratch = np.empty(row_scratch(num_heads, shape), np.float32)
        attend_phase(cells, 0, query, num_heads, flat_pool, shape, layer, where, scaling, output, scratch, threads)


@inline
def find_runs(row_sequence: I32, positions: I32) -> I32:
    """Where runs of up to 8 rows begin that are consecutive positions of one sequence, and the number of rows behind them."""
    runs = np.empty(positions.size + 1, np.int32)
    count = 0
    for row in range(positions.size):
        follows = row > 0 and row_sequence[row] == row_sequence[row - 1] and positions[row] == positions[row - 1] + 1
        if not follows or row - runs[count - 1] == _TOGETHER:
            runs[count] = row
            count += 1
    runs[count] = positions.size
    return runs[: count + 1]


@inline
def attend_phase(
    cells: I64,
    phase: int,
    query: F32,
    num_heads: int,
    pool: Pool,
    shape: tuple[int, int, int, int, int, int],
    layer: int,
    where: tuple[I32, I32, I32, I32],
    scaling: np.float32,
    output: F32,
    scratch: F32,
    threads: int,
) -> None:
    """One phase, an item for each run of rows, or for each kv head of one. ``where``: page tables, row sequence, positions, runs;
    ``scratch``: the thread's own, ``row_scratch`` of it; everything else flat."""
    page_tables, row_sequence, positions, runs = where
    num_runs, num_kv_heads = runs.size - 1, shape[4]
    # A row's heads lie side by side in each slot: one thread reads them together, unless runs are fewer than threads.
    heads_each = num_kv_heads if num_runs >= threads else 1
    items_each = num_kv_heads // heads_each
    item = take(cells, phase)
    while item < num_runs * items_each:
        first, last = runs[item // items_each], runs[item // items_each + 1]
        _attend(
            query,
            pool,
            shape,
            layer,
            item % items_each * heads_each,
            heads_each,
            page_tables[row_sequence[first]],
            positions[first],
            first,
            last - first,
            scaling,
            scratch,
            output,
            num_heads,
        )
        done(cells, phase)
        item = take(cells, phase)
    wait(cells, phase, num_runs * items_each)


@inline
def row_scratch(num_heads: int, shape: tuple[int, int, int, int, int, int]) -> int:
    """float32 that a thread needs for ``attend_phase``."""
    return 2 * _SLOTS * shape[4] * shape[5] + num_heads * (_SLOTS + 2 * _TOGETHER)


@inline
def _attend(
    query: F32,
    pool: Pool,
    shape: tuple[int, int, int, int, int, int],
    layer: int,
    first_head: int,
    kv_heads: int,
    page_table: I32,
    start: int,
    first_row: int,
    num_rows: int,
    scaling: np.float32,
    scratch: F32,
    output: F32,
    num_heads: int,
) -> None:
    """Softmax attention of the query heads that share kv heads ``first_head ..``, for a run of rows of which the first is at
    position ``start``. Rows and heads do not touch each other's sums: together they only read memory once, and in order.

    Keys and values of up to 16 slots are read together, and sums kept relative to the largest score so far (Milakov & Gimelshein,
    "Online normalizer calculation for softmax", 2018). Slots are copied out of the page first: read in the order of the scores,
    they come from memory at less than half the speed.
    """
    _, _, _, page_size, num_kv_heads, dim = shape
    stride, width, group = num_kv_heads * dim, kv_heads * dim, num_heads // num_kv_heads
    vectors = kv_heads * group
    values, scores = _SLOTS * width, 2 * _SLOTS * width
    tops = scores + vectors * _SLOTS
    sums = tops + vectors * num_rows
    for i in range(vectors * num_rows):
        scratch[tops + i], scratch[sums + i] = np.float32(-np.inf), np.float32(0.0)
    for row in range(num_rows):
        at = ((first_row + row) * num_heads + first_head * group) * dim
        for i in range(vectors * dim):
            output[at + i] = np.float32(0.0)
    lines = (2 * _SLOTS * width * pool.itemsize // 64) // (2 * kv_heads + vectors) + 1 if width == stride else 0
    position, length = 0, start + num_rows
    while position < length:
        slots = min(_SLOTS, page_size - position % page_size, length - position)
        keys = slot_offset(shape, layer, page_table, position) + first_head * dim
        _copy_slots(pool, keys, stride, scratch, 0, width, slots)
        _copy_slots(pool, keys + page_size * stride, stride, scratch, values, width, slots)
        # Ask for the following slots a few lines at a time: a core has some twenty requests to memory open and waits with the next.
        ahead, asked = slot_offset(shape, layer, page_table, min(position + slots, length - 1)) + first_head * dim, 0
        for row in range(max(0, position - start), num_rows):
            at = ((first_row + row) * num_heads + first_head * group) * dim
            count = min(slots, start + row + 1 - position)
            for head in range(kv_heads):
                queries, first = at + head * group * dim, scores + head * group * _SLOTS
                _scores(query, queries, scratch, head * dim, width, dim, count, scratch, first, _SLOTS, group)
                asked = _ask(pool, ahead, page_size * stride, width, asked, lines)
            for vector in range(vectors):
                first, state = scores + vector * _SLOTS, row * vectors + vector
                before, top = scratch[tops + state], largest(scratch, first, count)
                if top > before:
                    shrink = exp((before - top) * scaling)
                    multiply_all(output, at + vector * dim, dim, shrink)
                    scratch[sums + state] *= shrink
                    scratch[tops + state] = top
                exp_all(scratch, first, count, scratch[tops + state], scaling)
                scratch[sums + state] += total(scratch, first, count)
                asked = _ask(pool, ahead, page_size * stride, width, asked, lines)
            for head in range(kv_heads):
                mixed, first = at + head * group * dim, scores + head * group * _SLOTS
                mix(scratch, first, _SLOTS, scratch, values + head * dim, width, count, output, mixed, dim, group)
                asked = _ask(pool, ahead, page_size * stride, width, asked, lines)
        position += slots
    for row in range(num_rows):
        at = ((first_row + row) * num_heads + first_head * group) * dim
        for vector in range(vectors):
            multiply_all(output, at + vector * dim, dim, np.float32(1.0) / scratch[sums + row * vectors + vector])


@inline
def _ask(pool: Pool, keys: int, to_values: int, width: int, asked: int, lines: int) -> int:
    """Prefetch the next ``lines`` of 16 slots' keys and values, of which ``asked`` were asked for; how many now are."""
    line = 64 // pool.itemsize
    half = _SLOTS * width // line
    for number in range(asked, asked + lines):
        if number < half:
            prefetch(pool, keys + number * line)
        elif number < 2 * half:
            prefetch(pool, keys + to_values + (number - half) * line)
    return asked + lines


@inline
def _copy_slots(pool: Pool, at: int, stride: int, y: F32, y_at: int, width: int, count: int) -> None:
    if width == stride:
        widen_all(pool, at, y, y_at, count * width)
    else:
        for slot in range(count):
            widen_all(pool, at + slot * stride, y, y_at + slot * width, width)


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
def mix(
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
                summed = y[at + h * dim + rest]
                for slot in range(count):
                    summed = fma(p[p_at + h * length + slot], load_element(v, v_at + slot * stride + rest), summed)
                y[at + h * dim + rest] = summed
                rest += 1
        head += together
