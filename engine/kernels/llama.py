"""A Llama-shaped model's forward pass over any rows, in one call of one kernel.

A layer is eight phases (``team``): norm, QKV product, rotary embedding with the KV write, attention, output product with its
residual, norm, gate and up products with SiLU, down product with its residual. (Where not all rows' logits are wanted, the last
layer has one more, that picks them; with int8 weights there are two more, which prepare what attention and SiLU gave.) Every
result is computed by one thread in one order (``panels``, ``attention``), so a row's bits depend neither on the rows beside it
nor on the threads.
"""

from typing import Any, NamedTuple

import numba
import numpy as np
import numpy.typing as npt

from engine.kernels.attention import attend_phase, attention_scratch, find_runs
from engine.kernels.elementwise import nanoseconds
from engine.kernels.jit import F32, I32, I64, kernel
from engine.kernels.llama_phases import gate_up_phase, norm_phase, pick_phase, rotate_phase
from engine.kernels.panels import WIDTH, embed, prepare_phase, project
from engine.kernels.slots import Pool
from engine.kernels.team import CELLS, done, take, wait

_PHASES = 11  #: of a layer, at most


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
def forward(
    token_ids: I64,
    wanted: I32,
    weights: Weights,
    rows: Rows,
    epsilon: np.float32,
    scaling: np.float32,
    pool: Pool,
    store_from: int,
    logits: F32,
    attention_time: I64,
    threads: int,
) -> None:
    """Rows ``token_ids`` [N]: their keys and values into the pool, and ``logits`` [M, vocab] of the rows ``wanted`` [M], ascending.

    Keys and values at positions below ``store_from`` are in the pool already and are not written.
    ``attention_time`` [1] grows by the nanoseconds that attention took.
    """
    # One long body: everything in it is one parallel region, and what a region works on must be local to it. In a prange numba
    # writes to copies of a tuple's arrays: out of the tuples with them.
    positions, page_tables, row_sequence, cos, sin = rows.positions, rows.page_tables, rows.row_sequence, rows.cos, rows.sin
    qkv, query, query_norm, key_norm = rows.qkv, rows.query, weights.query_norm, weights.key_norm
    hidden, normed, attended = rows.hidden.reshape(-1), rows.normed.reshape(-1), rows.attended.reshape(-1)
    channels, flat_qkv, flat_query, flat_pool = rows.channels.reshape(-1), qkv.reshape(-1), query.reshape(-1), pool.reshape(-1)
    qkv_panels, out_panels = weights.qkv.reshape(-1), weights.out.reshape(-1)
    gate_up_panels, down_panels = weights.gate_up.reshape(-1), weights.down.reshape(-1)
    embedding_panels, head_panels, flat_logits = weights.embedding.reshape(-1), weights.head.reshape(-1), logits.reshape(-1)
    qkv_scale, out_scale, gate_up_scale, down_scale = (
        weights.qkv_scale,
        weights.out_scale,
        weights.gate_up_scale,
        weights.down_scale,
    )
    embedding_scale, head_scale, qkv_bias = weights.embedding_scale, weights.head_scale, weights.qkv_bias
    input_norm, post_norm, final_norm = weights.input_norm, weights.post_norm, weights.final_norm
    no_bias = final_norm[:0]

    num_layers, num_rows, shape = weights.qkv.shape[0], token_ids.size, pool.shape
    width, qkv_width, head_width, inner, vocab = (
        rows.hidden.shape[1],
        qkv.shape[1],
        query.shape[1],
        rows.channels.shape[1],
        logits.shape[1],
    )
    num_heads = head_width // shape[5]
    wanted_positions, wanted_sequence = positions[wanted], row_sequence[wanted]
    runs, wanted_runs = find_runs(row_sequence, positions), find_runs(wanted_sequence, wanted_positions)
    cells = np.zeros((_PHASES * num_layers + 4) * CELLS, np.int64)
    for thread in numba.prange(threads):
        gates = np.empty(2 * num_rows * WIDTH, np.float32)
        scratch = np.empty(attention_scratch(num_heads, shape), np.float32)
        row = take(cells, 0)
        while row < num_rows:
            embed(embedding_panels, width, token_ids[row], embedding_scale, hidden, row * width)
            done(cells, 0)
            row = take(cells, 0)
        wait(cells, 0, num_rows)
        n = num_rows
        for layer in range(num_layers):
            at = 1 + _PHASES * layer
            norm_phase(cells, at, hidden, n, width, input_norm[layer], epsilon, normed, qkv_panels)
            weight, bias = qkv_scale[layer], qkv_bias[layer]
            project(cells, at + 1, normed, n, width, qkv_panels, layer, weight, bias, flat_qkv, qkv_width, False, threads)
            gains = query_norm[layer], key_norm[layer]
            where = page_tables, row_sequence, positions, runs
            rotate_phase(cells, at + 2, layer, qkv, gains, epsilon, cos, sin, query, flat_pool, shape, where, store_from)
            if layer == num_layers - 1 and wanted.size < num_rows:
                # Of the last layer nothing else is wanted but its keys and values.
                if wanted.size == 0:
                    break
                n, where = wanted.size, (page_tables, wanted_sequence, wanted_positions, wanted_runs)
                pick_phase(cells, at + 3, wanted, flat_query, head_width, hidden, width)
            began = nanoseconds()
            attend_phase(cells, at + 4, flat_query, num_heads, flat_pool, shape, layer, where, scaling, attended, scratch, threads)
            if thread == 0:
                attention_time[0] += nanoseconds() - began
            prepare_phase(cells, at + 5, out_panels, attended, n, head_width)
            project(
                cells, at + 6, attended, n, head_width, out_panels, layer, out_scale[layer], no_bias, hidden, width, True, threads
            )
            norm_phase(cells, at + 7, hidden, n, width, post_norm[layer], epsilon, normed, gate_up_panels)
            gate_up_phase(
                cells, at + 8, normed, n, width, gate_up_panels, layer, gate_up_scale[layer], channels, inner, gates, threads
            )
            prepare_phase(cells, at + 9, down_panels, channels, n, inner)
            project(
                cells, at + 10, channels, n, inner, down_panels, layer, down_scale[layer], no_bias, hidden, width, True, threads
            )
        if wanted.size > 0:
            at = 1 + _PHASES * num_layers
            norm_phase(cells, at, hidden, n, width, final_norm, epsilon, normed, head_panels)
            project(cells, at + 1, normed, n, width, head_panels, 0, head_scale, no_bias, flat_logits, vocab, False, threads)
