"""Matrix products whose result for a row depends on that row alone, from weights laid out for them.

A *panel* is the weights of ``WIDTH`` neighbouring outputs, side by side: [in, WIDTH]. A tile of up to ``TILE_ROWS`` rows reads it
once, from end to end; each result is one chain of fused multiply-adds over the inputs, in order. So the bits of a result do not
depend on the tile, on the number of rows, or on which thread took the panel; and one row streams the weights at the speed of
memory, while many rows keep the multipliers busy.

Weights are float32, bfloat16 or int8 (symmetric, one scale for each output). With int8 the products of a group of inputs are
integers (``integers``), for which rows are prepared first: ``prepare``.
"""

from typing import Any

import numba
import numpy as np
import numpy.typing as npt

from engine.kernels.elementwise import load_element, store_element
from engine.kernels.integers import place_of, prepare_row, reads_integers
from engine.kernels.jit import F32, I64, inline, kernel
from engine.kernels.llvm import LANES, WIDE
from engine.kernels.team import CELLS, ROWS_EACH, done, take, wait
from engine.kernels.vector import make_pace, make_tile

# A tile's sums stay in registers, with room for what they are made of: of AVX-512's 32 they take 16, of AVX2's 16 half as wide, 12.
_VECTORS, TILE_ROWS = (2, 8) if WIDE else (1, 6)
WIDTH = _VECTORS * LANES
Panels = npt.NDArray[Any]
"""[panels, in, WIDTH] of float32 or uint16 (bfloat16); of int8 [panels, in / 2, WIDTH, 2] in the same shape, and ``in`` is even."""
#: number formats of weights, and how panels store them
FORMATS: dict[str, type] = {"fp32": np.float32, "bf16": np.uint16, "int8": np.int8}

_tile = make_tile(TILE_ROWS, _VECTORS)


@inline
def num_panels(outputs: int) -> int:
    return (outputs + WIDTH - 1) // WIDTH


@inline
def prepare(panels: Panels, x: F32, at: int, length: int) -> None:
    """``x[at : at + length]`` becomes, in place, what products with ``panels`` read."""
    if reads_integers(panels):
        prepare_row(x, at, length)


@inline
def prepare_phase(cells: I64, phase: int, panels: Panels, x: F32, num_rows: int, length: int) -> None:
    """``prepare`` each row of ``x``, flat."""
    if reads_integers(panels):
        items = (num_rows + ROWS_EACH - 1) // ROWS_EACH
        item = take(cells, phase)
        while item < items:
            for row in range(item * ROWS_EACH, min(num_rows, (item + 1) * ROWS_EACH)):
                prepare_row(x, row * length, length)
            done(cells, phase)
            item = take(cells, phase)
        wait(cells, phase, items)


@inline
def multiply_panel(
    x: F32,
    x_at: int,
    length: int,
    num_rows: int,
    panels: Panels,
    at: int,
    scale: F32,
    scale_at: int,
    y: F32,
    y_at: int,
    y_stride: int,
    add: bool,
    following: int,
) -> None:
    """``y[y_at + row · y_stride + o]``, for ``o < WIDTH``, is set to output o of the panel at ``panels[at:]`` for each row, times
    ``scale[scale_at + o]``; or that is added to it. Rows of ``length`` lie end to end at ``x[x_at:]``, prepared.

    ``following``: where the panel lies that this thread needs next, or -1. The first tile waits for memory, the others find the
    panel in the cache; while they compute, memory is asked for the next one. That takes a sixth of the time of 12 to 32 rows away.
    """
    # Tiles of equal height: a last tile of one row would cost half as much as a full one.
    tiles = (num_rows + TILE_ROWS - 1) // TILE_ROWS
    height = (num_rows + tiles - 1) // tiles
    ahead, end = following, following + length * WIDTH
    row = 0
    while row < num_rows:
        count = min(height, num_rows - row)
        asks = row > 0 and 0 <= ahead < end
        pace = make_pace(panels) if asks else 0
        _tile(
            count,
            x,
            x_at + row * length,
            length,
            panels,
            at,
            length,
            ahead if asks else at,
            pace,
            scale,
            scale_at,
            y,
            y_at + row * y_stride,
            y_stride,
            add,
        )
        ahead += length * pace
        row += count


@inline
def project(
    cells: I64,
    phase: int,
    x: F32,
    num_rows: int,
    length: int,
    panels: Panels,
    layer: int,
    scale: F32,
    bias: F32,
    y: F32,
    outputs: int,
    add: bool,
    threads: int,
) -> None:
    """``y = x @ weights.T · scale + bias``, or ``+=`` of it: one phase, an item for each panel. ``bias`` may be empty.

    ``x`` and ``y`` are flat, rows of ``length`` (prepared) and of ``outputs``; ``panels`` those of all layers.
    """
    count = num_panels(outputs)
    panel = take(cells, phase)
    while panel < count:
        weights, first = (layer * count + panel) * length * WIDTH, panel * WIDTH
        # Threads take turns, as a rule.
        following = weights + threads * length * WIDTH if panel + threads < count else -1
        if first + WIDTH <= outputs:
            multiply_panel(x, 0, length, num_rows, panels, weights, scale, first, y, first, outputs, add, following)
        else:
            _multiply_last(x, length, num_rows, panels, weights, scale, first, y, outputs, add)
        if bias.size:
            for row in range(num_rows):
                for o in range(first, min(first + WIDTH, outputs)):
                    y[row * outputs + o] += bias[o]
        done(cells, phase)
        panel = take(cells, phase)
    wait(cells, phase, count)


@inline
def _multiply_last(
    x: F32, length: int, num_rows: int, panels: Panels, at: int, scale: F32, first: int, y: F32, outputs: int, add: bool
) -> None:
    """A panel of which only the first outputs are real: computed elsewhere, since rows of ``y`` lie end to end."""
    results = np.empty(num_rows * WIDTH, np.float32)
    multiply_panel(x, 0, length, num_rows, panels, at, scale, first, results, 0, WIDTH, False, -1)
    for row in range(num_rows):
        for o in range(outputs - first):
            before = y[row * outputs + first + o] if add else np.float32(0.0)
            y[row * outputs + first + o] = before + results[row * WIDTH + o]


def linear_panels(x: F32, panels: Panels, scale: F32, bias: F32, y: F32, threads: int) -> None:
    """``y[n, out] = x[n, in] @ weights.T · scale + bias``, C-contiguous. ``panels`` as ``pack_new`` makes them, ``scale`` [P ·
    WIDTH], ``bias`` [out] or empty."""
    if panels.dtype == np.int8:
        rows = np.zeros((len(x), panels.shape[1]), np.float32)  # prepared in place, and of even length
        rows[:, : x.shape[1]] = x
        x = rows
    _linear(x, panels, scale, bias, y, threads)


@kernel(parallel=True)
def _linear(x: F32, panels: Panels, scale: F32, bias: F32, y: F32, threads: int) -> None:
    num_rows, length = x.shape
    outputs = y.shape[1]
    flat_x, flat_w, flat_y = x.reshape(-1), panels.reshape(-1), y.reshape(-1)
    cells = np.zeros(2 * CELLS, np.int64)
    for _ in numba.prange(threads):
        prepare_phase(cells, 0, flat_w, flat_x, num_rows, length)
        project(cells, 1, flat_x, num_rows, length, flat_w, 0, scale, bias, flat_y, outputs, False, threads)


@inline
def embed(panels: Panels, length: int, token: int, scale: F32, y: F32, at: int) -> None:
    """``y[at : at + length]`` = row ``token`` of the weights in flat ``panels``: an embedding table kept as the output layer is."""
    first, output = token // WIDTH * length * WIDTH, token % WIDTH
    for k in range(length):
        y[at + k] = load_element(panels, first + place_of(panels, k, output, WIDTH)) * scale[token]


@kernel(parallel=True)
def _pack_floats(weight: F32, panels: Panels, threads: int) -> None:
    outputs, length = weight.shape
    flat = panels.reshape(-1)
    for thread in numba.prange(threads):
        for panel in range(thread, panels.shape[0], threads):
            for k in range(length):
                for o in range(min(WIDTH, outputs - panel * WIDTH)):
                    store_element(flat, (panel * length + k) * WIDTH + o, weight[panel * WIDTH + o, k])


@kernel(parallel=True)
def _pack_integers(weight: F32, panels: Panels, scale: F32, threads: int) -> None:
    outputs, length = weight.shape
    flat, extent = panels.reshape(-1), panels.shape[1] * WIDTH
    for thread in numba.prange(threads):
        for panel in range(thread, panels.shape[0], threads):
            for o in range(min(WIDTH, outputs - panel * WIDTH)):
                output = panel * WIDTH + o
                largest = np.float32(0.0)
                for k in range(length):
                    largest = max(largest, abs(weight[output, k]))
                scale[output] = largest / np.float32(127.0)
                inverse = np.float32(127.0) / largest if largest > 0 else np.float32(0.0)
                for k in range(length):
                    flat[panel * extent + place_of(flat, k, o, WIDTH)] = np.int8(np.rint(weight[output, k] * inverse))


def pack(weight: F32, panels: Panels, scale: F32, threads: int) -> None:
    """Fill ``panels`` [P, in, WIDTH] (zeros before) and ``scale`` [P * WIDTH] (ones before) from ``weight`` [out, in], float32.

    int8: symmetric, the largest weight of each output becomes ±127, rounded to the nearest, ties to even.
    """
    if panels.dtype == np.int8:
        _pack_integers(weight, panels, scale, threads)
    else:
        _pack_floats(weight, panels, threads)


def unpack(panels: Panels, scale: F32, outputs: int, length: int) -> F32:
    """The weights [outputs, length] that ``panels`` and ``scale`` stand for."""
    if panels.dtype == np.uint16:
        panels = (panels.astype(np.uint32) << 16).view(np.float32)
    if panels.dtype == np.int8:
        panels = panels.reshape(len(panels), -1, WIDTH, 2).swapaxes(2, 3).reshape(panels.shape)
    weight = panels.astype(np.float32).transpose(0, 2, 1).reshape(-1, panels.shape[1])
    result: F32 = weight[:outputs, :length] * scale[:outputs, None]
    return result


def panels_for(outputs: int, length: int, weights: str) -> tuple[tuple[int, int, int], type]:
    """Shape and element type of the panels of a layer in the number format ``weights``, one of ``FORMATS``."""
    even = length + length % 2 if weights == "int8" else length
    return (num_panels(outputs), even, WIDTH), FORMATS[weights]


def pack_new(weight: F32, weights: str, threads: int) -> tuple[Panels, F32]:
    """Panels and scales of ``weight`` [out, in] in memory of their own; ``weights`` is one of ``FORMATS``."""
    shape, element = panels_for(weight.shape[0], weight.shape[1], weights)
    panels: Panels = np.zeros(shape, element)
    scale = np.ones(shape[0] * WIDTH, np.float32)
    pack(weight, panels, scale, threads)
    return panels, scale
