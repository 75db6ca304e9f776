"""Activations of generated rows. torch's change a row's bits with its neighbours when the row is no multiple of a vector (SiLU
of width 172)."""

import math

import numba
import numpy as np

from engine.kernels.jit import F32, inline, kernel
from engine.kernels.vector import float_from_bits, fma

SILU, GELU, GELU_TANH = 0, 1, 2

_LOG2_E = np.float32(1.4426950408889634)
_LN2_HIGH = np.float32(0.693359375)  # ln 2 in two parts: the first has few bits, so that n · _LN2_HIGH is exact
_LN2_LOW = np.float32(-2.12194440e-4)
_ROUND = np.float32(12582912.0)  # 1.5 · 2²³: adding it rounds to an integer in the low bits
_SMALLEST, _LARGEST = np.float32(-87.33), np.float32(88.37)
_ONE, _HALF = np.float32(1.0), np.float32(0.5)
_C0, _C1, _C2 = np.float32(1.9875691500e-4), np.float32(1.3981999507e-3), np.float32(8.3334519073e-3)
_C3, _C4, _C5 = np.float32(4.1665795894e-2), np.float32(1.6666665459e-1), np.float32(5.0000001201e-1)
_GELU_INNER = np.float32(2.0 * math.sqrt(2.0 / math.pi))
_GELU_CUBE = np.float32(0.044715)
_SQRT_HALF = math.sqrt(0.5)


@inline
def exp(x: np.float32) -> np.float32:
    """e to the x in float32, within 2 ulp; the polynomial of Cephes' ``expf``. 0 below -87.33, capped above 88.37, NaN for NaN.

    Built of single-rounded operations, so vectorised and scalar code give the same bits (libm and SVML need not).
    """
    bounded = min(max(x, _SMALLEST), _LARGEST)
    shifted = fma(bounded, _LOG2_E, _ROUND)
    n = shifted - _ROUND
    r = fma(n, -_LN2_LOW, fma(n, -_LN2_HIGH, bounded))
    p = fma(_C0, r, _C1)
    p = fma(p, r, _C2)
    p = fma(p, r, _C3)
    p = fma(p, r, _C4)
    p = fma(p, r, _C5)
    value = fma(p, r * r, r + _ONE)
    scaled = value * float_from_bits(np.int32((np.int32(n) + np.int32(127)) << np.int32(23)))
    return scaled if x >= _SMALLEST else (np.float32(0.0) if x < _SMALLEST else x)


@inline
def silu(x: np.float32) -> np.float32:
    return x / (_ONE + exp(-x))


@inline
def _gelu_tanh(x: np.float32) -> np.float32:
    # 0.5 (1 + tanh u) = 1 / (1 + exp(-2u)): no cancellation for small u.
    return x / (_ONE + exp(-_GELU_INNER * fma(_GELU_CUBE * x * x, x, x)))


@inline
def _gelu(x: np.float32) -> np.float32:
    return np.float32(x * 0.5 * (1.0 + math.erf(x * _SQRT_HALF)))


@kernel(parallel=True)
def activate_rows(x: F32, y: F32, kind: int, threads: int) -> None:
    """``y = f(x)`` for flat, equally long float32 arrays; ``kind`` is ``SILU``, ``GELU`` (erf) or ``GELU_TANH``."""
    for thread in numba.prange(threads):
        first, last = x.size * thread // threads, x.size * (thread + 1) // threads
        if kind == SILU:
            for i in range(first, last):
                y[i] = silu(x[i])
        elif kind == GELU_TANH:
            for i in range(first, last):
                y[i] = _gelu_tanh(x[i])
        else:
            for i in range(first, last):
                y[i] = _gelu(x[i])
