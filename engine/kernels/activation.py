"""Activations of generated rows. torch's change a row's bits with its neighbours when the row is no multiple of a vector (SiLU
of width 172)."""

import math

import numba
import numpy as np

from engine.kernels.elementwise import exp, fma, silu
from engine.kernels.jit import F32, inline, kernel

SILU, GELU, GELU_TANH = 0, 1, 2

_ONE = np.float32(1.0)
_GELU_INNER = np.float32(2.0 * math.sqrt(2.0 / math.pi))
_GELU_CUBE = np.float32(0.044715)
_SQRT_HALF = math.sqrt(0.5)


@inline
def _gelu_tanh(x: np.float32) -> np.float32:
    # 0.5 (1 + tanh u) = 1 / (1 + exp(-2u)): no cancellation for small u.
    gelu: np.float32 = x / (_ONE + exp(-_GELU_INNER * fma(_GELU_CUBE * x * x, x, x)))
    return gelu


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
