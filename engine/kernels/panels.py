"""Matrix products whose result for a row depends on that row alone, from weights laid out for them.

A *panel* is the weights of ``WIDTH`` neighbouring outputs, side by side: [in, WIDTH]. A tile of up to ``TILE_ROWS`` rows reads it
once, from end to end; each result is one chain of fused multiply-adds over the inputs, in order. So the bits of a result do not
depend on the tile, on the number of rows, or on which thread took the panel; and one row streams the weights at the speed of
memory, while many rows keep the multipliers busy.

Weights are float32, bfloat16 or int8 (symmetric, one scale for each output); sums are float32 always.
"""

from typing import Any

import numba
import numpy as np
import numpy.typing as npt
from llvmlite import binding

from engine.kernels.jit import F32, inline, kernel
from engine.kernels.vector import LANES, load_element, make_tile, store_element, take

WIDTH = 2 * LANES
# Sixteen sums of 16 lanes leave half of AVX-512's registers for what they are made of; elsewhere registers are narrower.
TILE_ROWS = 8 if binding.get_host_cpu_features().get("avx512f", False) else 2
Panels = npt.NDArray[Any]
"""[panels, in, WIDTH] of float32, uint16 (bfloat16) or int8."""
#: number formats of weights, and how panels store them
FORMATS: dict[str, type] = {"fp32": np.float32, "bf16": np.uint16, "int8": np.int8}

_tile_1, _tile_2, _tile_3, _tile_4 = make_tile(1, 2), make_tile(2, 2), make_tile(3, 2), make_tile(4, 2)
_tile_5, _tile_6, _tile_7, _tile_8 = make_tile(5, 2), make_tile(6, 2), make_tile(7, 2), make_tile(8, 2)


def num_panels(outputs: int) -> int:
    return -(-outputs // WIDTH)


@inline
def panel_sums(x: F32, length: int, num_rows: int, panels: Panels, at: int, sums: F32) -> None:
    """``sums[row * WIDTH + o]`` = row · output o of the panel at ``panels[at:]``. ``x`` is flat, rows of ``length`` end to end."""
    # Tiles of equal height: a last tile of one row would cost half as much as a full one.
    tiles = (num_rows + TILE_ROWS - 1) // TILE_ROWS
    height = (num_rows + tiles - 1) // tiles
    row = 0
    while row < num_rows:
        count = min(height, num_rows - row)
        if count == 8:
            _tile_8(x, row * length, length, panels, at, length, sums, row * WIDTH, WIDTH)
        elif count == 7:
            _tile_7(x, row * length, length, panels, at, length, sums, row * WIDTH, WIDTH)
        elif count == 6:
            _tile_6(x, row * length, length, panels, at, length, sums, row * WIDTH, WIDTH)
        elif count == 5:
            _tile_5(x, row * length, length, panels, at, length, sums, row * WIDTH, WIDTH)
        elif count == 4:
            _tile_4(x, row * length, length, panels, at, length, sums, row * WIDTH, WIDTH)
        elif count == 3:
            _tile_3(x, row * length, length, panels, at, length, sums, row * WIDTH, WIDTH)
        elif count == 2:
            _tile_2(x, row * length, length, panels, at, length, sums, row * WIDTH, WIDTH)
        else:
            _tile_1(x, row * length, length, panels, at, length, sums, row * WIDTH, WIDTH)
        row += count


@kernel(parallel=True)
def linear_panels(x: F32, panels: Panels, scale: F32, bias: F32, y: F32, threads: int) -> None:
    """``y[n, out] = x[n, in] @ weights.T · scale + bias``, C-contiguous; an empty ``bias`` means none. ``panels`` [P, in, WIDTH],
    ``scale`` [P · WIDTH], ``bias`` [out]."""
    num_rows, length = x.shape
    outputs = y.shape[1]
    flat_x, flat_w = x.reshape(-1), panels.reshape(-1)
    counter = np.zeros(1, np.int64)
    for _ in numba.prange(threads):
        sums = np.empty(num_rows * WIDTH, np.float32)
        panel = take(counter, 0)
        while panel < panels.shape[0]:
            panel_sums(flat_x, length, num_rows, flat_w, panel * length * WIDTH, sums)
            first = panel * WIDTH
            for row in range(num_rows):
                for o in range(min(WIDTH, outputs - first)):
                    y[row, first + o] = sums[row * WIDTH + o] * scale[first + o]
                if bias.size:
                    for o in range(min(WIDTH, outputs - first)):
                        y[row, first + o] += bias[first + o]
            panel = take(counter, 0)


@kernel(parallel=True)
def add_linear_panels(x: F32, panels: Panels, scale: F32, y: F32, threads: int) -> None:
    """``y += x @ weights.T · scale``: a projection back into the residual stream."""
    num_rows, length = x.shape
    outputs = y.shape[1]
    flat_x, flat_w = x.reshape(-1), panels.reshape(-1)
    counter = np.zeros(1, np.int64)
    for _ in numba.prange(threads):
        sums = np.empty(num_rows * WIDTH, np.float32)
        panel = take(counter, 0)
        while panel < panels.shape[0]:
            panel_sums(flat_x, length, num_rows, flat_w, panel * length * WIDTH, sums)
            first = panel * WIDTH
            for row in range(num_rows):
                for o in range(min(WIDTH, outputs - first)):
                    y[row, first + o] += sums[row * WIDTH + o] * scale[first + o]
            panel = take(counter, 0)


@inline
def embed(panels: Panels, length: int, token: int, scale: F32, y: F32, at: int) -> None:
    """``y[at : at + length]`` = row ``token`` of the weights in flat ``panels``: an embedding table kept as the output layer is."""
    first = token // WIDTH * length * WIDTH + token % WIDTH
    for k in range(length):
        y[at + k] = load_element(panels, first + k * WIDTH) * scale[token]


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
                    panels[panel, k, o] = np.int8(np.rint(weight[output, k] * inverse))


def pack(weight: F32, panels: Panels, scale: F32, threads: int) -> None:
    """Fill ``panels`` [P, in, WIDTH] (zeros before) and ``scale`` [P * WIDTH] (ones before) from ``weight`` [out, in], float32.

    int8: symmetric, the largest weight of each output becomes ±127, rounded to the nearest, ties to even.
    """
    if panels.dtype == np.int8:
        _pack_integers(weight, panels, scale, threads)
    else:
        _pack_floats(weight, panels, threads)


def unpack(panels: Panels, scale: F32, outputs: int) -> F32:
    """The weights [outputs, in] that ``panels`` and ``scale`` stand for."""
    if panels.dtype == np.uint16:
        panels = (panels.astype(np.uint32) << 16).view(np.float32)
    weight = panels.astype(np.float32).transpose(0, 2, 1).reshape(-1, panels.shape[1])
    result: F32 = weight[:outputs] * scale[:outputs, None]
    return result


def pack_new(weight: F32, weights: str, threads: int) -> tuple[Panels, F32]:
    """Panels and scales of ``weight`` [out, in] in memory of their own; ``weights`` is one of ``FORMATS``."""
    count = num_panels(weight.shape[0])
    panels: Panels = np.zeros((count, weight.shape[1], WIDTH), FORMATS[weights])
    scale = np.ones(count * WIDTH, np.float32)
    pack(weight, panels, scale, threads)
    return panels, scale
