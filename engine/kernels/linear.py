"""y = x Wᵀ + b for generated rows: a row's bits never depend on the other rows of the call."""

import numba
from llvmlite import binding

from engine.kernels.jit import F32, inline, kernel
from engine.kernels.vector import make_dots

_dots_4x4, _dots_3x4, _dots_2x4, _dots_1x8 = make_dots(4, 4), make_dots(3, 4), make_dots(2, 4), make_dots(1, 8)
_dots_4x1, _dots_3x1, _dots_2x1, _dots_1x1 = make_dots(4, 1), make_dots(3, 1), make_dots(2, 1), make_dots(1, 1)
_dots_2x2, _dots_1x4 = make_dots(2, 2), make_dots(1, 4)

# Sixteen sums of 16 lanes fill the 32 registers of AVX-512 well; half the register bytes hold a quarter of them.
WIDE = bool(binding.get_host_cpu_features().get("avx512f", False))


@kernel(parallel=True)
def linear_rows(x: F32, weight: F32, bias: F32, y: F32, threads: int) -> None:
    """``y[n, out] = x[n, in] @ weight[out, in].T + bias[out]``, all float32 and C-contiguous; an empty ``bias`` means none.

    Threads share the outputs, so the weights are read once from memory however many rows there are.
    """
    num_rows, length = x.shape
    outputs = weight.shape[0]
    flat_x, flat_w, flat_y = x.reshape(-1), weight.reshape(-1), y.reshape(-1)
    for thread in numba.prange(threads):
        first = (outputs * thread // threads) & ~7
        last = outputs if thread == threads - 1 else (outputs * (thread + 1) // threads) & ~7
        if num_rows == 1:
            _single_row(flat_x, flat_w, flat_y, length, first, last)
        elif WIDE:
            _wide_tiles(flat_x, flat_w, flat_y, num_rows, length, outputs, first, last)
        else:
            _narrow_tiles(flat_x, flat_w, flat_y, num_rows, length, outputs, first, last)
        if bias.size:
            for row in range(num_rows):
                for o in range(first, last):
                    y[row, o] += bias[o]


@inline
def _single_row(x: F32, w: F32, y: F32, length: int, first: int, last: int) -> None:
    o = first
    while o + 8 <= last:
        _dots_1x8(x, 0, 0, w, o * length, length, length, y, o, 0)
        o += 8
    while o < last:
        _dots_1x1(x, 0, 0, w, o * length, length, length, y, o, 0)
        o += 1


@inline
def _wide_tiles(x: F32, w: F32, y: F32, num_rows: int, length: int, outputs: int, first: int, last: int) -> None:
    o = first
    while o + 4 <= last:
        row = 0
        while row + 4 <= num_rows:
            _dots_4x4(x, row * length, length, w, o * length, length, length, y, row * outputs + o, outputs)
            row += 4
        if num_rows - row == 3:
            _dots_3x4(x, row * length, length, w, o * length, length, length, y, row * outputs + o, outputs)
        elif num_rows - row == 2:
            _dots_2x4(x, row * length, length, w, o * length, length, length, y, row * outputs + o, outputs)
        elif num_rows - row == 1:
            _dots_1x4(x, row * length, length, w, o * length, length, length, y, row * outputs + o, outputs)
        o += 4
    _last_outputs(x, w, y, num_rows, length, outputs, o, last)


@inline
def _narrow_tiles(x: F32, w: F32, y: F32, num_rows: int, length: int, outputs: int, first: int, last: int) -> None:
    o = first
    while o + 2 <= last:
        row = 0
        while row + 2 <= num_rows:
            _dots_2x2(x, row * length, length, w, o * length, length, length, y, row * outputs + o, outputs)
            row += 2
        if row < num_rows:
            _dots_1x1(x, row * length, length, w, o * length, length, length, y, row * outputs + o, outputs)
            _dots_1x1(x, row * length, length, w, (o + 1) * length, length, length, y, row * outputs + o + 1, outputs)
        o += 2
    _last_outputs(x, w, y, num_rows, length, outputs, o, last)


@inline
def _last_outputs(x: F32, w: F32, y: F32, num_rows: int, length: int, outputs: int, first: int, last: int) -> None:
    for o in range(first, last):
        for row in range(num_rows):
            _dots_1x1(x, row * length, length, w, o * length, length, length, y, row * outputs + o, outputs)
