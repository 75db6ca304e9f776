"""The weights of a vocabulary's tokens: integers, so that no sum depends on its order.

e to the (score - largest) / temperature is rounded to so many bits that 64 hold the sum of the vocabulary's.
"""

import math
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from engine.kernels.jit import F32, I64, inline
from engine.kernels.selection import BLOCK, key_of

_LN2 = math.log(2.0)
_LEAST_EXPONENT = -64.0  # every weight below is 0
_ROUND = 1.5 * 2.0**52  # adding it rounds to an integer in the low bits
_ROUND_BITS = int(np.float64(_ROUND).view(np.int64))
_C = tuple(_LN2**k / math.factorial(k) for k in range(12))  # Taylor's series of 2 to the x: within 1e-14 for |x| ≤ 0.5


@intrinsic  # type: ignore[untyped-decorator]
def bits_of(typing: Any, value: Any) -> Any:
    """The bits of a float32 as int32, of a float64 as int64."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], context.get_value_type(signature.return_type))

    return (types.int32 if value == types.float32 else types.int64)(value), generate


@intrinsic  # type: ignore[untyped-decorator]
def _double_from_bits(typing: Any, bits: Any) -> Any:
    """The float64 whose bits are the given int64."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.DoubleType())

    return types.float64(types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def _fma(typing: Any, a: Any, b: Any, c: Any) -> Any:
    """a · b + c, rounded once, in float64."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.fma(*args)

    return types.float64(types.float64, types.float64, types.float64), generate


@inline
def unit(vocab: int) -> float:
    """The weight of the likeliest token: the largest power of 2 with which 2⁶² holds the sum of the vocabulary's, up to 2⁵⁰."""
    exponent = 50
    while vocab > 1 << (62 - exponent):
        exponent -= 1
    return float(1 << exponent)


@inline
def weight_of(score: np.float32, shift: float, factor: float, one: float) -> int:
    """2 to the (score - shift) · factor, in units of 1 / ``one``, rounded."""
    exponent = max((np.float64(score) - shift) * factor, _LEAST_EXPONENT)
    rounded = exponent + _ROUND
    x = exponent - (rounded - _ROUND)
    p = _fma(_C[11], x, _C[10])
    p = _fma(p, x, _C[9])
    p = _fma(p, x, _C[8])
    p = _fma(p, x, _C[7])
    p = _fma(p, x, _C[6])
    p = _fma(p, x, _C[5])
    p = _fma(p, x, _C[4])
    p = _fma(p, x, _C[3])
    p = _fma(p, x, _C[2])
    p = _fma(p, x, _C[1])
    p = _fma(p, x, _C[0])
    power = _double_from_bits((bits_of(rounded) - _ROUND_BITS + 1023) << 52)
    weight: int = bits_of(_fma(p * power, one, _ROUND)) - _ROUND_BITS
    return weight


@inline
def weigh(scores: F32, shift: float, factor: float, one: float, sums: I64) -> int:
    """Weight of each block into ``sums``; of all."""
    total = 0
    for block in range(len(sums)):
        at, here = block * BLOCK, 0
        for i in range(min(BLOCK, len(scores) - at)):
            here += weight_of(scores[at + i], shift, factor, one)
        sums[block] = here
        total += here
    return total


@inline
def least_key(weight: float, shift: float, factor: float) -> int:
    """A key that no token of at least this weight (the likeliest's is 1) lies below, though rounding were against it."""
    return int(np.int64(key_of(bits_of(np.float32(shift + math.log2(0.999 * weight) / factor))))) - 1


@inline
def draw(scores: F32, shift: float, factor: float, one: float, sums: I64, at: int) -> int:
    """The token in whose share of the weights, laid out in the order of the ids, ``at`` lies."""
    block = 0
    while at >= sums[block]:
        at -= sums[block]
        block += 1
    i = block * BLOCK
    weight = weight_of(scores[i], shift, factor, one)
    while at >= weight:
        at -= weight
        i += 1
        weight = weight_of(scores[i], shift, factor, one)
    return i
