"""Attention over pages: each (row, kv head) alone, positions in order."""

import numba
import numpy as np

from engine.kernels.elementwise import fma, load_element, multiply_all, soften, store_element
from engine.kernels.jit import F32, I32, I64, inline, kernel
from engine.kernels.llvm import LANES, WIDE
from engine.kernels.panels import WIDTH, multiply_panel, num_panels
from engine.kernels.slots import SLOTS, Pool, ask, find_slots, slot_offset, touch_slots, turn_keys
from engine.kernels.team import CELLS, done, take, wait
from engine.kernels.vector import make_weighted_sums

_TOGETHER = 32  #: rows of a run
_ONE = np.float32(1.0)

_MIXED, _VECTORS = (4, 4) if WIDE else (6, 1)  #: rows and vectors whose sums stay in registers, see ``panels``
_sums, _sums_of_one = make_weighted_sums(_MIXED, _VECTORS), make_weighted_sums(_MIXED, 1)


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
    """Where runs of up to 32 rows begin that are consecutive positions of one sequence, and the number of rows behind them."""
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
    return (dim + 1 + vectors // shape[4]) * SLOTS + 2 * vectors * (dim + 1)


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
    offsets = np.empty(2 * SLOTS, np.int64)
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
    scales = SLOTS * dim  # behind the panels
    scores = scales + SLOTS
    tops = scores + vectors * SLOTS
    sums = tops + kv_heads * vectors
    queries = sums + kv_heads * vectors
    mixed = queries + kv_heads * vectors * dim
    for i in range(SLOTS):
        scratch[scales + i] = scaling
    for i in range(kv_heads * vectors):
        scratch[tops + i], scratch[sums + i] = np.float32(-np.inf), np.float32(0.0)
    rows = first_row, num_rows, first_head, kv_heads, group
    _take_queries(query, num_heads, rows, dim, scratch, queries, mixed)
    more = 2 * SLOTS // (kv_heads * (4 * dim // LANES + group + 1)) + 1
    length = start + num_rows
    find_slots(shape, layer, page_table, first_head, 0, length, offsets, 0)
    touch_slots(pool, offsets, min(SLOTS, length), width, to_values)
    for position in range(0, length, SLOTS):
        now, following = position % (2 * SLOTS), (position + SLOTS) % (2 * SLOTS)
        find_slots(shape, layer, page_table, first_head, position + SLOTS, length, offsets, following)
        slots, asked = min(SLOTS, length - position), 0
        ahead = following, width, to_values, more, 2 * min(SLOTS, length - position - SLOTS)
        first = max(0, position - start)  # the rows before see none of these positions
        begin, weights = first * group, scores + first * group * SLOTS
        for head in range(kv_heads):
            at, value = (head * vectors + begin) * dim, to_values + head * dim
            for panel in range(num_panels(slots)):
                asked = turn_keys(pool, offsets, now + panel * WIDTH, head * dim, dim, scratch, panel * WIDTH * dim, ahead, asked)
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
                    SLOTS,
                    False,
                    -1,
                )
            asked = ask(pool, offsets, ahead, asked)
            for row in range(first, num_rows):
                seen = min(slots, start + row + 1 - position)
                for vector in range(row * group, (row + 1) * group):
                    state = head * vectors + vector
                    shrink = soften(scratch, scores + vector * SLOTS, seen, tops + state, sums + state)
                    if shrink != _ONE:
                        multiply_all(scratch, mixed + state * dim, dim, shrink)
                    asked = ask(pool, offsets, ahead, asked)
            if start + first + 1 - position >= slots:  # all rows see all
                _mix(scratch, weights, pool, offsets, now, value, slots, mixed + at, dim, vectors - begin)
            else:
                for row in range(first, num_rows):
                    seen, at = min(slots, start + row + 1 - position), mixed + (head * vectors + row * group) * dim
                    _mix(scratch, scores + row * group * SLOTS, pool, offsets, now, value, seen, at, dim, group)
    _give_results(scratch, mixed, sums, rows, dim, output, num_heads)


@inline
def _take_queries(
    query: F32, num_heads: int, rows: tuple[int, int, int, int, int], dim: int, scratch: F32, at: int, mixed: int
) -> None:
    """The queries of a run to ``scratch[at:]``, [kv_heads, rows, group, dim]; zeros where values will be mixed. ``rows``: first
    row, rows, first kv head, kv heads, query heads of each."""
    first_row, num_rows, first_head, kv_heads, group = rows
    for head in range(kv_heads):
        for row in range(num_rows):
            source = ((first_row + row) * num_heads + (first_head + head) * group) * dim
            place = (head * num_rows + row) * group * dim
            for i in range(group * dim):
                scratch[at + place + i], scratch[mixed + place + i] = query[source + i], np.float32(0.0)


@inline
def _give_results(
    scratch: F32, mixed: int, sums: int, rows: tuple[int, int, int, int, int], dim: int, output: F32, num_heads: int
) -> None:
    """Mixed values, each divided by the sum of its weights, to their rows and heads of ``output``."""
    first_row, num_rows, first_head, kv_heads, group = rows
    for head in range(kv_heads):
        for vector in range(num_rows * group):
            state, row = head * num_rows * group + vector, vector // group
            inverse = _ONE / scratch[sums + state]
            target = ((first_row + row) * num_heads + (first_head + head) * group + vector % group) * dim
            for d in range(dim):
                output[target + d] = scratch[mixed + state * dim + d] * inverse


@inline
def _mix(
    p: F32, p_first: int, pool: Pool, offsets: I64, first: int, value: int, count: int, y_at: int, dim: int, group: int
) -> None:
    """Add the values of ``count`` positions, weighted, to ``group`` sums in ``p[y_at:]``; positions in order."""
    head = 0
    while head < group:
        together = min(_MIXED, group - head)
        p_at, at = p_first + head * SLOTS, y_at + head * dim
        d = 0
        while d + _VECTORS * LANES <= dim:
            _sums(together, p, p_at, SLOTS, pool, offsets, first, value + d, count, p, at + d, dim)
            d += _VECTORS * LANES
        while d + LANES <= dim:
            _sums_of_one(together, p, p_at, SLOTS, pool, offsets, first, value + d, count, p, at + d, dim)
            d += LANES
        while d < dim:
            for h in range(together):
                summed = p[at + h * dim + d]
                for slot in range(count):
                    weight = p[p_at + h * SLOTS + slot]
                    summed = fma(weight, load_element(pool, offsets[first + slot] + value + d), summed)
                p[at + h * dim + d] = summed
            d += 1
        head += together
