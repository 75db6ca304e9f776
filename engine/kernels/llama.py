"""A Llama-shaped model's forward pass over generated rows, in one call.

A layer is six parallel regions: norm, QKV product, rotary embedding with the KV write, attention, output product with its residual,
norm, gate and up products with SiLU, down product with its residual. Between regions all threads meet; within one they take panels,
or rows, as they come free. Every result is computed by one thread in one order (``panels``, ``attention``), so a row's bits depend
neither on the rows beside it nor on the threads.

Prompt chunks use the same pieces, but for attention, which torch computes there.
"""

from typing import Any, NamedTuple

import numba
import numpy as np
import numpy.typing as npt

from engine.kernels.activation import silu
from engine.kernels.attention import Pool, attend, slot_offset
from engine.kernels.jit import F32, I32, I64, inline, kernel
from engine.kernels.panels import WIDTH, add_linear_panels, embed, linear_panels, panel_sums
from engine.kernels.vector import make_dots, nanoseconds, store_element, take

_dots_1x1 = make_dots(1, 1)
_SERIAL = 1 << 14  #: elements that one thread handles sooner than several meet
_ONE = np.float32(1.0)


# Kernels that take a tuple are not parallel: inside a prange, numba writes to copies of a tuple's arrays.


class Weights(NamedTuple):
    """A model's weights as the kernels read them; see ``panels`` for panels and scales. All layers side by side.

    Projections that read the same rows are one product: queries, keys and values lie behind one another; gate and up alternate,
    panel by panel, so that both halves of a channel meet in one thread. What a model does not have is empty (``qkv_bias``,
    ``query_norm``, ``key_norm``). ``embedding`` is ``head`` itself where they are tied.
    """

    qkv: npt.NDArray[Any]  #: [layers, panels, hidden, WIDTH]
    out: npt.NDArray[Any]  #: [layers, panels, heads * head_dim, WIDTH]
    gate_up: npt.NDArray[Any]  #: [layers, 2 * panels, hidden, WIDTH]
    down: npt.NDArray[Any]  #: [layers, panels, intermediate, WIDTH]
    head: npt.NDArray[Any]  #: [panels, hidden, WIDTH]
    embedding: npt.NDArray[Any]  #: [panels, hidden, WIDTH]
    qkv_scale: F32  #: [layers, panels * WIDTH], like the scales below
    out_scale: F32
    gate_up_scale: F32
    down_scale: F32
    head_scale: F32  #: [panels * WIDTH]
    embedding_scale: F32
    qkv_bias: F32  #: [layers, outputs or 0]
    input_norm: F32  #: [layers, hidden]
    post_norm: F32  #: [layers, hidden]
    final_norm: F32  #: [hidden]
    query_norm: F32  #: [layers, head_dim or 0]
    key_norm: F32


class Rows(NamedTuple):
    """What a call computes, and the memory it needs; N rows."""

    positions: I32  #: [N]
    page_tables: I32  #: [S, max_pages]
    row_sequence: I32  #: [N], which page table
    cos: F32  #: [N, head_dim / 2], of each row's position
    sin: F32
    hidden: F32  #: [N, hidden]: the residual stream
    normed: F32  #: [N, hidden]
    qkv: F32  #: [N, (heads + 2 * kv_heads) * head_dim]
    query: F32  #: [N, heads * head_dim], rotated
    attended: F32  #: [N, heads * head_dim]
    channels: F32  #: [N, intermediate]


@kernel(parallel=True)
def rms_norm(x: F32, gain: F32, epsilon: np.float32, y: F32, threads: int) -> None:
    """``y = x / sqrt(mean(x²) + epsilon) · gain`` for each row of ``x`` [N, hidden] (Zhang & Sennrich 2019)."""
    num_rows, length = x.shape
    flat, out = x.reshape(-1), y.reshape(-1)
    together = threads if x.size > _SERIAL else 1
    for thread in numba.prange(together):
        square = np.empty(1, np.float32)
        for row in range(num_rows * thread // together, num_rows * (thread + 1) // together):
            _norm(flat, row * length, length, gain, epsilon, out, row * length, square)


@inline
def _norm(x: F32, at: int, length: int, gain: F32, epsilon: np.float32, y: F32, y_at: int, square: F32) -> None:
    _dots_1x1(x, at, 0, x, at, 0, length, square, 0, 0)
    inverse = _ONE / np.sqrt(square[0] / np.float32(length) + epsilon)
    for k in range(length):
        y[y_at + k] = x[at + k] * inverse * gain[k]


@kernel(parallel=True)
def rotate_and_store(
    layer: int,
    qkv: F32,
    query_norm: F32,
    key_norm: F32,
    epsilon: np.float32,
    cos: F32,
    sin: F32,
    query: F32,
    pool: Pool,
    page_tables: I32,
    row_sequence: I32,
    positions: I32,
    store_from: int,
    threads: int,
) -> None:
    """Rotary embedding (Su et al. 2021, halves paired as in transformers) of queries into ``query`` and of keys into the pool,
    values as they are. Rows at positions below ``store_from`` are in the pool already. Arguments as in ``Weights`` and ``Rows``.
    """
    num_rows, dim = positions.size, pool.shape[5]
    heads, kv_heads, half = query.shape[1] // dim, pool.shape[4], dim // 2
    flat_pool = pool.reshape(-1)
    together = threads if qkv.size > _SERIAL else 1
    for thread in numba.prange(together):
        square = np.empty(1, np.float32)
        for row in range(num_rows * thread // together, num_rows * (thread + 1) // together):
            x = qkv[row]
            if query_norm.size > 0:
                for head in range(heads):
                    _norm(x, head * dim, dim, query_norm, epsilon, x, head * dim, square)
                for head in range(heads, heads + kv_heads):
                    _norm(x, head * dim, dim, key_norm, epsilon, x, head * dim, square)
            for head in range(heads):
                for d in range(half):
                    low, high = x[head * dim + d], x[head * dim + half + d]
                    query[row, head * dim + d] = low * cos[row, d] - high * sin[row, d]
                    query[row, head * dim + half + d] = high * cos[row, d] + low * sin[row, d]
            if positions[row] < store_from:
                continue
            keys = slot_offset(pool.shape, layer, page_tables[row_sequence[row]], positions[row])
            values = keys + pool.shape[3] * kv_heads * dim
            for head in range(kv_heads):
                source = (heads + head) * dim
                for d in range(half):
                    low, high = x[source + d], x[source + half + d]
                    store_element(flat_pool, keys + head * dim + d, low * cos[row, d] - high * sin[row, d])
                    store_element(flat_pool, keys + head * dim + half + d, high * cos[row, d] + low * sin[row, d])
            for i in range(kv_heads * dim):
                store_element(flat_pool, values + i, x[(heads + kv_heads) * dim + i])


@kernel(parallel=True)
def gate_and_up(x: F32, panels: npt.NDArray[Any], scale: F32, y: F32, threads: int) -> None:
    """``y = silu(gate(x)) · up(x)`` (Shazeer 2020); ``panels`` [2P, in, WIDTH], of gate and up in turn."""
    num_rows, length = x.shape
    channels, extent = y.shape[1], length * WIDTH
    flat_x, flat_w = x.reshape(-1), panels.reshape(-1)
    counter = np.zeros(1, np.int64)
    for _ in numba.prange(threads):
        sums = np.empty(num_rows * WIDTH, np.float32)
        pair = take(counter, 0)
        while 2 * pair < panels.shape[0]:
            first = pair * WIDTH
            valid = min(WIDTH, channels - first)
            panel_sums(flat_x, length, num_rows, flat_w, 2 * pair * extent, sums)
            for row in range(num_rows):
                for o in range(valid):
                    y[row, first + o] = silu(sums[row * WIDTH + o] * scale[2 * first + o])
            panel_sums(flat_x, length, num_rows, flat_w, (2 * pair + 1) * extent, sums)
            for row in range(num_rows):
                for o in range(valid):
                    y[row, first + o] *= sums[row * WIDTH + o] * scale[2 * first + WIDTH + o]
            pair = take(counter, 0)


@kernel()
def begin_layer(layer: int, weights: Weights, rows: Rows, epsilon: np.float32, pool: Pool, store_from: int, threads: int) -> None:
    """Everything before attention: ``rows.hidden`` → ``rows.query`` and the pool."""
    rms_norm(rows.hidden, weights.input_norm[layer], epsilon, rows.normed, threads)
    linear_panels(rows.normed, weights.qkv[layer], weights.qkv_scale[layer], weights.qkv_bias[layer], rows.qkv, threads)
    rotate_and_store(
        layer,
        rows.qkv,
        weights.query_norm[layer],
        weights.key_norm[layer],
        epsilon,
        rows.cos,
        rows.sin,
        rows.query,
        pool,
        rows.page_tables,
        rows.row_sequence,
        rows.positions,
        store_from,
        threads,
    )


@kernel()
def end_layer(layer: int, weights: Weights, rows: Rows, epsilon: np.float32, threads: int) -> None:
    """Everything after attention: ``rows.attended`` into ``rows.hidden``."""
    add_linear_panels(rows.attended, weights.out[layer], weights.out_scale[layer], rows.hidden, threads)
    rms_norm(rows.hidden, weights.post_norm[layer], epsilon, rows.normed, threads)
    gate_and_up(rows.normed, weights.gate_up[layer], weights.gate_up_scale[layer], rows.channels, threads)
    add_linear_panels(rows.channels, weights.down[layer], weights.down_scale[layer], rows.hidden, threads)


@kernel()
def embed_rows(token_ids: I64, weights: Weights, hidden: F32) -> None:
    """``hidden`` [N, hidden] = the embeddings of ``token_ids`` [N]."""
    flat, length = hidden.reshape(-1), hidden.shape[1]
    for row in range(token_ids.size):
        embed(weights.embedding.reshape(-1), length, token_ids[row], weights.embedding_scale, flat, row * length)


@kernel()
def compute_logits(wanted: I32, weights: Weights, rows: Rows, epsilon: np.float32, logits: F32, threads: int) -> None:
    """``logits`` [M, vocab] of the rows ``wanted`` [M], ascending. Uses ``rows.hidden`` up."""
    count = wanted.size
    for i in range(count):
        if wanted[i] != i:
            rows.hidden[i] = rows.hidden[wanted[i]]
    normed = rows.normed[:count]
    rms_norm(rows.hidden[:count], weights.final_norm, epsilon, normed, threads)
    linear_panels(normed, weights.head, weights.head_scale, weights.final_norm[:0], logits, threads)


@kernel()
def forward_rows(
    token_ids: I64,
    wanted: I32,
    weights: Weights,
    rows: Rows,
    epsilon: np.float32,
    scaling: np.float32,
    pool: Pool,
    logits: F32,
    attention_time: I64,
    threads: int,
) -> None:
    """Generated rows ``token_ids`` [N]: their keys and values into the pool, and ``logits`` [M, vocab] of the rows ``wanted``.

    ``attention_time`` [1] grows by the nanoseconds that attention took.
    """
    heads = rows.query.shape[1] // pool.shape[5]
    embed_rows(token_ids, weights, rows.hidden)
    for layer in range(weights.qkv.shape[0]):
        begin_layer(layer, weights, rows, epsilon, pool, 0, threads)
        began = nanoseconds()
        attend(
            rows.query.reshape(-1),
            heads,
            pool,
            layer,
            rows.page_tables,
            rows.row_sequence,
            rows.positions,
            scaling,
            rows.attended.reshape(-1),
            threads,
        )
        attention_time[0] += nanoseconds() - began
        end_layer(layer, weights, rows, epsilon, threads)
    if wanted.size > 0:
        compute_logits(wanted, weights, rows, epsilon, logits, threads)
