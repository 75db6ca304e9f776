"""Attention over pages: each (row, kv head) alone, positions in order."""

from typing import Any

import numba
import numpy as np
import numpy.typing as npt

from engine.kernels.elementwise import SOFTENED, fma, load_element, multiply_all, prefetch, soften, store_element, touch
from engine.kernels.jit import F32, I32, I64, inline, kernel
from engine.kernels.llvm import LANES
from engine.kernels.panels import WIDTH, multiply_panel, num_panels
from engine.kernels.team import CELLS, done, take, wait
from engine.kernels.vector import make_weighted_sums, turn_block

_SLOTS = SOFTENED  #: positions that are read together, as two panels
_TOGETHER = 32  #: rows of a run
_ONE = np.float32(1.0)

Pool = npt.NDArray[Any]
"""[num_pages, num_layers, 2, page_size, num_kv_heads, head_dim] of float32, uint16 (bfloat16) or int16 (float16)."""

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
        scratch = np.empty(attention_scratch(num_heads, shape), np.float32)
        attend_phase(cells, 0, query, num_heads, flat_pool, shape, layer, where, scaling, output, scratch, threads)


@inline
def find_runs(row_sequence: I32, positions: I32) -> I32:
    """Where runs of up to 16 rows begin that are consecutive positions of one sequence, and the number of rows behind them."""
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
def attention_scratch(num_heads: int, shape: tuple[int, int, int, int, int, int]) -> int:
    """float32 that a thread needs for ``attend_phase``."""
    vectors, dim = _TOGETHER * num_heads, shape[5]
    return (dim + 1 + vectors // shape[4]) * _SLOTS + 2 * vectors * (dim + 1)


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
    ``scratch``: the thread's own, ``attention_scratch`` of it; everything else flat."""
    page_tables, row_sequence, positions, runs = where
    num_runs, num_kv_heads = runs.size - 1, shape[4]
    offsets = np.empty(2 * _SLOTS, np.int64)
    # A row's heads lie side by side in each slot: one thread reads them together, unless runs are fewer than threads.
    heads_each = num_kv_heads if num_runs >= threads else 1
    items_each = num_kv_heads // heads_each
    item = take(cells, phase)
    while item < num_runs * items_each:
        # The last run first: of a prompt it reads the most, and whoever took it last would keep the others waiting.
        run = num_runs - 1 - item // items_each
        first, last = runs[run], runs[run + 1]
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
            offsets,
            output,
            num_heads,
        )
        done(cells, phase)
        item = take(cells, phase)
    wait(cells, phase, num_runs * items_each)


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
    offsets: I64,
    output: F32,
    num_heads: int,
) -> None:
    """Softmax attention of the query heads that share kv heads ``first_head ..``, for a run of rows of which the first is at
    position ``start``. Rows and heads do not touch each other's sums: together they only read memory once.

    64 positions are taken together, and sums kept relative to the largest score so far (Milakov & Gimelshein, "Online normalizer
    calculation for softmax", 2018). Their keys are turned into panels, so that scores are products like any other; of positions
    that a row does not see, they come to nothing. ``offsets`` [128]: where the keys of these positions lie, and of those to come.
    """
    dim = shape[5]
    group, to_values, width = num_heads // shape[4], shape[3] * shape[4] * shape[5], kv_heads * shape[5]
    vectors = num_rows * group  # of a kv head
    scales = _SLOTS * dim  # behind the panels
    scores = scales + _SLOTS
    tops = scores + vectors * _SLOTS
    sums = tops + kv_heads * vectors
    queries = sums + kv_heads * vectors
    mixed = queries + kv_heads * vectors * dim
    for i in range(_SLOTS):
        scratch[scales + i] = scaling
    for i in range(kv_heads * vectors):
        scratch[tops + i], scratch[sums + i] = np.float32(-np.inf), np.float32(0.0)
    for head in range(kv_heads):
        for row in range(num_rows):
            source = ((first_row + row) * num_heads + (first_head + head) * group) * dim
            at = (head * num_rows + row) * group * dim
            for i in range(group * dim):
                scratch[queries + at + i], scratch[mixed + at + i] = query[source + i], np.float32(0.0)
    more = 2 * _SLOTS // (kv_heads * (4 * dim // LANES + group + 1)) + 1
    length = start + num_rows
    _find_slots(shape, layer, page_table, first_head, 0, length, offsets, 0)
    _touch_slots(pool, offsets, min(_SLOTS, length), width, to_values)
    for position in range(0, length, _SLOTS):
        now, following = position % (2 * _SLOTS), (position + _SLOTS) % (2 * _SLOTS)
        _find_slots(shape, layer, page_table, first_head, position + _SLOTS, length, offsets, following)
        slots, asked = min(_SLOTS, length - position), 0
        ahead = following, width, to_values, more, 2 * min(_SLOTS, length - position - _SLOTS)
        first = max(0, position - start)  # the rows before see none of these positions
        begin, weights = first * group, scores + first * group * _SLOTS
        for head in range(kv_heads):
            at, value = (head * vectors + begin) * dim, to_values + head * dim
            for panel in range(num_panels(slots)):
                asked = _turn_keys(pool, offsets, now + panel * WIDTH, head * dim, dim, scratch, panel * WIDTH * dim, ahead, asked)
                multiply_panel(
                    scratch,
                    queries + at,
                    dim,
                    vectors - begin,
                    scratch,
                    panel * WIDTH * dim,
                    scratch,
                    scales,
                    scratch,
                    weights + panel * WIDTH,
                    _SLOTS,
                    False,
                )
            asked = _ask(pool, offsets, ahead, asked)
            for row in range(first, num_rows):
                seen = min(slots, start + row + 1 - position)
                for vector in range(row * group, (row + 1) * group):
                    state = head * vectors + vector
                    shrink = soften(scratch, scores + vector * _SLOTS, seen, tops + state, sums + state)
                    if shrink != _ONE:
                        multiply_all(scratch, mixed + state * dim, dim, shrink)
                    asked = _ask(pool, offsets, ahead, asked)
            if start + first + 1 - position >= slots:  # all rows see all
                _mix(scratch, weights, pool, offsets, now, value, slots, mixed + at, dim, vectors - begin)
            else:
                for row in range(first, num_rows):
                    seen, at = min(slots, start + row + 1 - position), mixed + (head * vectors + row * group) * dim
                    _mix(scratch, scores + row * group * _SLOTS, pool, offsets, now, value, seen, at, dim, group)
    for head in range(kv_heads):
        for vector in range(vectors):
            state, row = head * vectors + vector, vector // group
            inverse = _ONE / scratch[sums + state]
            target = ((first_row + row) * num_heads + (first_head + head) * group + vector % group) * dim
            for d in range(dim):
                output[target + d] = scratch[mixed + state * dim + d] * inverse


@inline
def _find_slots(
    shape: tuple[int, int, int, int, int, int],
    layer: int,
    page_table: I32,
    first_head: int,
    position: int,
    length: int,
    offsets: I64,
    at: int,
) -> None:
    """``offsets[at : at + 64]``: where the keys of 64 positions from ``position`` on lie; the last one's for those behind it."""
    page_size, stride = shape[3], shape[4] * shape[5]
    slot, known = 0, min(_SLOTS, length - position)
    while slot < known:
        count = min(known - slot, page_size - (position + slot) % page_size)
        first = slot_offset(shape, layer, page_table, position + slot) + first_head * shape[5]
        for i in range(count):
            offsets[at + slot + i] = first + i * stride
        slot += count
    for slot in range(max(0, known), _SLOTS if known > 0 else 0):
        offsets[at + slot] = offsets[at + known - 1]


@inline
def _touch_slots(pool: Pool, offsets: I64, slots: int, width: int, to_values: int) -> None:
    """Bring the first positions, which nobody could ask for, in the order of memory."""
    for half in range(2):
        for slot in range(slots):
            for i in range(0, width, 64 // pool.itemsize):
                touch(pool, offsets[slot] + half * to_values + i)


@inline
def _ask(pool: Pool, offsets: I64, ahead: tuple[int, int, int, int, int], asked: int) -> int:
    """Prefetch keys or values of a few of the positions to come, of which ``asked`` were asked for; how many now are. ``ahead``:
    where in ``offsets`` they begin, their width, from keys to values, how many at a time, how many in all.

    So the order in which they are read then does not matter: keys first and values afterwards, they came from memory at less than
    half the speed. A few at a time: a core has some twenty requests to memory open and waits with the next."""
    at, width, to_values, more, every = ahead
    upto = min(asked + more, every)
    for number in range(asked, upto):
        place = offsets[at + number // 2] + number % 2 * to_values
        for i in range(0, width, 64 // pool.itemsize):
            prefetch(pool, place + i)
    return max(asked, upto)


@inline
def _turn_keys(
    pool: Pool,
    offsets: I64,
    first: int,
    head_at: int,
    dim: int,
    panels: F32,
    at: int,
    ahead: tuple[int, int, int, int, int],
    asked: int,
) -> int:
    """A panel of the keys of 32 positions, [dim, 32], to ``panels[at:]``; asks for those to come meanwhile."""
    d = 0
    while d + LANES <= dim:
        for half in range(0, WIDTH, LANES):
            turn_block(pool, offsets, first + half, head_at + d, panels, at + d * WIDTH + half, WIDTH)
            asked = _ask(pool, offsets, ahead, asked)
        d += LANES
    while d < dim:
        for slot in range(WIDTH):
            panels[at + d * WIDTH + slot] = load_element(pool, offsets[first + slot] + head_at + d)
        d += 1
    return asked


@inline
def _mix(
    p: F32, p_first: int, pool: Pool, offsets: I64, first: int, value: int, count: int, y_at: int, dim: int, group: int
) -> None:
    """Add the values of ``count`` positions, weighted, to ``group`` sums in ``p[y_at:]``; positions in order."""
    head = 0
    while head < group:
        together = min(4, group - head)
        p_at, at = p_first + head * _SLOTS, y_at + head * dim
        d = 0
        while d + 4 * LANES <= dim:
            if together == 4:
                _sums_4x4(p, p_at, _SLOTS, pool, offsets, first, value + d, count, p, at + d, dim)
            elif together == 3:
                _sums_3x4(p, p_at, _SLOTS, pool, offsets, first, value + d, count, p, at + d, dim)
            elif together == 2:
                _sums_2x4(p, p_at, _SLOTS, pool, offsets, first, value + d, count, p, at + d, dim)
            else:
                _sums_1x4(p, p_at, _SLOTS, pool, offsets, first, value + d, count, p, at + d, dim)
            d += 4 * LANES
        for h in range(together):
            rest = d
            while rest + LANES <= dim:
                _sums_1x1(p, p_at + h * _SLOTS, _SLOTS, pool, offsets, first, value + rest, count, p, at + h * dim + rest, dim)
                rest += LANES
            while rest < dim:
                summed = p[at + h * dim + rest]
                for slot in range(count):
                    weight = p[p_at + h * _SLOTS + slot]
                    summed = fma(weight, load_element(pool, offsets[first + slot] + value + rest), summed)
                p[at + h * dim + rest] = summed
                rest += 1
        head += together
