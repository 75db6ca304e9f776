"""What a layer of a Llama-shaped model does beside products and attention, each as a phase (``team``) of the forward pass."""

import numpy as np

from engine.kernels.elementwise import gate_all, store_element
from engine.kernels.jit import F32, I32, I64, inline
from engine.kernels.panels import WIDTH, Panels, multiply_panel, num_panels, prepare
from engine.kernels.slots import Pool, slot_offset
from engine.kernels.team import ROWS_EACH, done, take, wait
from engine.kernels.vector import dot

_ONE = np.float32(1.0)


@inline
def norm_phase(
    cells: I64,
    phase: int,
    x: F32,
    num_rows: int,
    length: int,
    gain: F32,
    epsilon: np.float32,
    y: F32,
    panels: Panels,
) -> None:
    """``y = x / sqrt(mean(x²) + epsilon) · gain`` for each row (Zhang & Sennrich 2019), prepared for ``panels``. ``x`` and ``y``
    flat."""
    items = (num_rows + ROWS_EACH - 1) // ROWS_EACH
    item = take(cells, phase)
    while item < items:
        for row in range(item * ROWS_EACH, min(num_rows, (item + 1) * ROWS_EACH)):
            _norm(x, row * length, length, gain, epsilon, y, row * length)
            prepare(panels, y, row * length, length)
        done(cells, phase)
        item = take(cells, phase)
    wait(cells, phase, items)


@inline
def _norm(x: F32, at: int, length: int, gain: F32, epsilon: np.float32, y: F32, y_at: int) -> None:
    inverse = _ONE / np.sqrt(dot(x, at, x, at, length) / np.float32(length) + epsilon)
    for k in range(length):
        y[y_at + k] = x[at + k] * inverse * gain[k]


@inline
def rotate_phase(
    cells: I64,
    phase: int,
    layer: int,
    qkv: F32,
    gains: tuple[F32, F32],
    epsilon: np.float32,
    cos: F32,
    sin: F32,
    query: F32,
    pool: Pool,
    shape: tuple[int, int, int, int, int, int],
    where: tuple[I32, I32, I32, I32],
    store_from: int,
) -> None:
    """Rotary embedding (Su et al. 2021, halves paired as in transformers) of queries into ``query`` and of keys into the pool,
    values as they are. Rows at positions below ``store_from`` are in the pool already. Arguments as in ``Weights`` and ``Rows``;
    ``gains``: query norm and key norm of the layer; ``where``: page tables, row sequence, positions, runs; ``pool`` flat.
    """
    query_norm, key_norm = gains
    page_tables, row_sequence, positions, _ = where
    items = (positions.size + ROWS_EACH - 1) // ROWS_EACH
    item = take(cells, phase)
    while item < items:
        for row in range(item * ROWS_EACH, min(positions.size, (item + 1) * ROWS_EACH)):
            _rotate(
                layer,
                qkv[row],
                query_norm,
                key_norm,
                epsilon,
                cos[row],
                sin[row],
                query[row],
                pool,
                shape,
                page_tables[row_sequence[row]],
                positions[row],
                positions[row] >= store_from,
            )
        done(cells, phase)
        item = take(cells, phase)
    wait(cells, phase, items)


@inline
def _rotate(
    layer: int,
    x: F32,
    query_norm: F32,
    key_norm: F32,
    epsilon: np.float32,
    cos: F32,
    sin: F32,
    query: F32,
    pool: Pool,
    shape: tuple[int, int, int, int, int, int],
    page_table: I32,
    position: int,
    store: bool,
) -> None:
    kv_heads, dim = shape[4], shape[5]
    heads, half = query.size // dim, dim // 2
    if query_norm.size > 0:
        for head in range(heads):
            _norm(x, head * dim, dim, query_norm, epsilon, x, head * dim)
        for head in range(heads, heads + kv_heads):
            _norm(x, head * dim, dim, key_norm, epsilon, x, head * dim)
    for head in range(heads):
        for d in range(half):
            low, high = x[head * dim + d], x[head * dim + half + d]
            query[head * dim + d] = low * cos[d] - high * sin[d]
            query[head * dim + half + d] = high * cos[d] + low * sin[d]
    if not store:
        return
    keys = slot_offset(shape, layer, page_table, position)
    values = keys + shape[3] * kv_heads * dim
    for head in range(kv_heads):
        source = (heads + head) * dim
        for d in range(half):
            low, high = x[source + d], x[source + half + d]
            store_element(pool, keys + head * dim + d, low * cos[d] - high * sin[d])
            store_element(pool, keys + head * dim + half + d, high * cos[d] + low * sin[d])
    for i in range(kv_heads * dim):
        store_element(pool, values + i, x[(heads + kv_heads) * dim + i])


@inline
def gate_up_phase(
    cells: I64,
    phase: int,
    x: F32,
    num_rows: int,
    length: int,
    panels: Panels,
    layer: int,
    scale: F32,
    y: F32,
    channels: int,
    scratch: F32,
    threads: int,
) -> None:
    """``y = silu(gate(x)) · up(x)`` (Shazeer 2020), an item for each ``WIDTH`` channels; panels of gate and up in
    turn, of all layers.

    ``x`` (prepared) and ``y`` are flat; ``scratch`` [2 · num_rows · WIDTH] is the thread's own.
    """
    pairs, extent, size = num_panels(channels), length * WIDTH, num_rows * WIDTH
    pair = take(cells, phase)
    while pair < pairs:
        first, gate = pair * WIDTH, 2 * (layer * pairs + pair) * extent
        up = gate + extent
        following = gate + 2 * threads * extent if pair + threads < pairs else -1
        multiply_panel(x, 0, length, num_rows, panels, gate, scale, 2 * first, scratch, 0, WIDTH, False, up)
        if first + WIDTH <= channels:
            multiply_panel(x, 0, length, num_rows, panels, up, scale, 2 * first + WIDTH, y, first, channels, False, following)
            for row in range(num_rows):
                gate_all(y, row * channels + first, scratch, row * WIDTH, WIDTH)
        else:
            multiply_panel(x, 0, length, num_rows, panels, up, scale, 2 * first + WIDTH, scratch, size, WIDTH, False, -1)
            gate_all(scratch, size, scratch, 0, size)
            for row in range(num_rows):
                for o in range(channels - first):
                    y[row * channels + first + o] = scratch[size + row * WIDTH + o]
        done(cells, phase)
        pair = take(cells, phase)
    wait(cells, phase, pairs)


@inline
def pick_phase(cells: I64, phase: int, wanted: I32, query: F32, query_width: int, hidden: F32, width: int) -> None:
    """Rows ``wanted``, ascending, become the first ones. One item."""
    if take(cells, phase) == 0:
        for i in range(wanted.size):
            for k in range(query_width):
                query[i * query_width + k] = query[wanted[i] * query_width + k]
            for k in range(width):
                hidden[i * width + k] = hidden[wanted[i] * width + k]
        done(cells, phase)
    wait(cells, phase, 1)
