"""Attention of a prompt chunk over pages: blocks of rows, whose scores are products with the keys like any other."""

import numpy as np

from engine.kernels.attention import Pool, mix, slot_offset
from engine.kernels.elementwise import exp_all, largest, load_element, multiply_all, total, widen_all
from engine.kernels.jit import F32, I32, I64, inline
from engine.kernels.panels import WIDTH, multiply_panel, num_panels
from engine.kernels.team import done, take, wait

_BLOCK = 64  #: rows that share one turning of the keys
_TOGETHER = 8  #: rows whose scores are computed together


@inline
def chunk_scratch(num_heads: int, shape: tuple[int, int, int, int, int, int], longest: int) -> int:
    """float32 that a thread needs for ``attend_chunk_phase`` over ``longest`` positions."""
    group, head_dim = num_heads // shape[4], shape[5]
    return (2 * head_dim + _TOGETHER * group) * num_panels(longest) * WIDTH + 2 * _TOGETHER * group * head_dim


@inline
def attend_chunk_phase(
    cells: I64,
    phase: int,
    query: F32,
    num_heads: int,
    pool: Pool,
    shape: tuple[int, int, int, int, int, int],
    layer: int,
    page_table: I32,
    start: int,
    num_rows: int,
    scaling: np.float32,
    output: F32,
    scratch: F32,
) -> None:
    """A prompt chunk's rows ``start .. start + num_rows - 1`` over positions 0 .. their own, which are all in the pool: one phase,
    an item for each kv head of each block of rows. ``scratch``: the thread's own, ``chunk_scratch`` of it.

    The keys of a block are turned into panels, so that scores are products like any other. Sums are taken in another order than by
    ``attend_phase``, which reads keys where they lie.
    """
    num_kv_heads, head_dim = shape[4], shape[5]
    group = num_heads // num_kv_heads
    blocks = (num_rows + _BLOCK - 1) // _BLOCK
    item = take(cells, phase)
    while item < blocks * num_kv_heads:
        # The last block first: it reads the most, and whoever took it last would keep the others waiting.
        first = (blocks - 1 - item // num_kv_heads) * _BLOCK
        kv_head = item % num_kv_heads
        last = min(num_rows, first + _BLOCK)
        size = num_panels(start + last) * WIDTH * head_dim
        _turn_keys(pool, shape, layer, kv_head, page_table, start + last, scratch)
        for position in range(start + last):
            values = slot_offset(shape, layer, page_table, position) + (shape[3] * num_kv_heads + kv_head) * head_dim
            widen_all(pool, values, scratch, size + position * head_dim, head_dim)
        for row in range(first, last, _TOGETHER):
            count = min(_TOGETHER, last - row)
            _attend_together(query, num_heads, group, head_dim, kv_head, start + row, row, count, scaling, output, scratch, size)
        done(cells, phase)
        item = take(cells, phase)
    wait(cells, phase, blocks * num_kv_heads)


@inline
def _turn_keys(
    pool: Pool, shape: tuple[int, int, int, int, int, int], layer: int, kv_head: int, page_table: I32, length: int, panels: F32
) -> None:
    """One kv head's keys of positions 0 .. length - 1 as panels of 32 positions, [head_dim, WIDTH] each; zeros behind the last."""
    head_dim = shape[5]
    for position in range(num_panels(length) * WIDTH):
        at = position // WIDTH * head_dim * WIDTH + position % WIDTH
        if position < length:
            source = slot_offset(shape, layer, page_table, position) + kv_head * head_dim
            for d in range(head_dim):
                panels[at + d * WIDTH] = load_element(pool, source + d)
        else:
            for d in range(head_dim):
                panels[at + d * WIDTH] = np.float32(0.0)


@inline
def _softmax(weights: F32, at: int, length: int, scaling: np.float32) -> None:
    """In place, over ``weights[at : at + length] · scaling``; ``scaling`` is positive."""
    exp_all(weights, at, length, largest(weights, at, length), scaling)
    multiply_all(weights, at, length, np.float32(1.0) / total(weights, at, length))


@inline
def _attend_together(
    query: F32,
    num_heads: int,
    group: int,
    head_dim: int,
    kv_head: int,
    position: int,
    row: int,
    count: int,
    scaling: np.float32,
    output: F32,
    scratch: F32,
    size: int,
) -> None:
    """Rows ``row .. row + count - 1``, of which the first is at ``position``. ``scratch[:size]`` holds the keys as panels, as much
    behind it the values, position by position."""
    vectors, length = count * group, position + count
    panels = num_panels(length)
    wide = panels * WIDTH
    ones = np.ones(WIDTH, np.float32)
    scores, queries = 2 * size, 2 * size + vectors * wide
    mixed = queries + vectors * head_dim
    for r in range(count):
        source = ((row + r) * num_heads + kv_head * group) * head_dim
        for i in range(group * head_dim):
            scratch[queries + r * group * head_dim + i] = query[source + i]
    for panel in range(panels):
        at = scores + panel * WIDTH
        multiply_panel(scratch, queries, head_dim, vectors, scratch, panel * head_dim * WIDTH, ones, 0, scratch, at, wide, False)
    for r in range(count):
        seen = position + r + 1
        for head in range(group):
            at = scores + (r * group + head) * wide
            _softmax(scratch, at, seen, scaling)
            for i in range(at + seen, at + length):
                scratch[i] = np.float32(0.0)
    for i in range(mixed, mixed + vectors * head_dim):
        scratch[i] = np.float32(0.0)
    mix(scratch, scores, wide, scratch, size, head_dim, length, scratch, mixed, head_dim, vectors)
    for r in range(count):
        target = ((row + r) * num_heads + kv_head * group) * head_dim
        for i in range(group * head_dim):
            output[target + i] = scratch[mixed + r * group * head_dim + i]
