"""Single elements and stretches of arrays: widening, exp, SiLU, sums. A vector's lane and a lone number have the same bits."""

import time
from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from engine.kernels.llvm import (
    FLOAT,
    INDEX,
    INT32,
    LANES,
    VECTOR,
    array_data,
    fma_of,
    fold_lanes,
    load,
    load_vector,
    loop,
    narrow,
    prefetch_line,
    splat,
    store,
    store_vector,
)

_MONOTONIC = time.CLOCK_MONOTONIC


@intrinsic  # type: ignore[untyped-decorator]
def load_element(typing: Any, array: Any, at: Any) -> Any:
    """``array[at]`` as float32, from any of the types that kernels read."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return load(builder, array, array_data(context, builder, array, args[0]), args[1])

    return types.float32(array, types.intp), generate


@intrinsic  # type: ignore[untyped-decorator]
def store_element(typing: Any, array: Any, at: Any, value: Any) -> Any:
    """``array[at] = value``, a float32 rounded to the nearest that a float32, bfloat16 or float16 array holds, ties to even."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        place = builder.gep(array_data(context, builder, array, args[0]), [args[1]])
        builder.store(narrow(builder, array, args[2]), place, align=array.dtype.bitwidth // 8)
        return context.get_dummy_value()

    return types.void(array, types.intp, types.float32), generate


def _constant(like: Any, value: float) -> Any:
    return ir.Constant(like, [value] * LANES) if isinstance(like, ir.VectorType) else ir.Constant(like, value)


def _exp(builder: Any, x: Any) -> Any:
    """Of a float32 or of a vector of them; see ``exp``."""

    def number(value: float) -> Any:
        return _constant(x.type, float(np.float32(value)))

    low, high, magic, one = number(-87.33), number(88.37), number(12582912.0), number(1.0)
    bounded = builder.select(builder.fcmp_ordered(">", x, low), x, low)
    bounded = builder.select(builder.fcmp_ordered("<", bounded, high), bounded, high)
    # Adding 1.5 · 2²³ rounds to an integer; ln 2 is in two parts, of which the first has so few bits that n times it is exact.
    n = builder.fsub(fma_of(builder, bounded, number(1.4426950408889634), magic), magic)
    r = fma_of(builder, n, number(2.12194440e-4), fma_of(builder, n, number(-0.693359375), bounded))
    p = number(1.9875691500e-4)
    for coefficient in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        p = fma_of(builder, p, r, number(coefficient))
    value = fma_of(builder, p, builder.fmul(r, r), builder.fadd(r, one))
    integer = ir.VectorType(INT32, LANES) if isinstance(x.type, ir.VectorType) else INT32
    exponent = builder.shl(builder.add(builder.fptosi(n, integer), _constant(integer, 127)), _constant(integer, 23))
    scaled = builder.fmul(value, builder.bitcast(exponent, x.type))
    below = builder.select(builder.fcmp_ordered("<", x, low), number(0.0), x)
    return builder.select(builder.fcmp_ordered(">=", x, low), scaled, below)


def _silu(builder: Any, x: Any) -> Any:
    one = _constant(x.type, 1.0)
    return builder.fdiv(x, builder.fadd(one, _exp(builder, builder.fneg(x))))


@intrinsic  # type: ignore[untyped-decorator]
def exp(typing: Any, x: Any) -> Any:
    """e to the x in float32, within 2 ulp; the polynomial of Cephes' ``expf``. 0 below -87.33, capped above 88.37, NaN for NaN.

    Built of single-rounded operations, so that a vector's lane and a lone number have the same bits (libm and SVML need not).
    """
    return types.float32(types.float32), lambda context, builder, signature, args: _exp(builder, args[0])


@intrinsic  # type: ignore[untyped-decorator]
def silu(typing: Any, x: Any) -> Any:
    """x / (1 + e^-x) in float32."""
    return types.float32(types.float32), lambda context, builder, signature, args: _silu(builder, args[0])


def _for_each(builder: Any, count: Any, body: Callable[[Any, Any, Any], None]) -> None:
    """``body(k, load, store)`` for k = 0, 16, ... with vectors, then for what is left with single numbers."""
    whole = builder.and_(count, ir.Constant(INDEX, -LANES))

    def with_vectors(k: Any, carried: list[Any]) -> list[Any]:
        body(k, load_vector, store_vector)
        return []

    def with_numbers(k: Any, carried: list[Any]) -> list[Any]:
        body(k, load, store)
        return []

    loop(builder, ir.Constant(INDEX, 0), whole, LANES, [], with_vectors)
    loop(builder, whole, count, 1, [], with_numbers)


def _spread(builder: Any, number: Any, like: Any) -> Any:
    return splat(builder, number) if isinstance(like.type, ir.VectorType) else number


SOFTENED = 4 * LANES
"""Scores that ``soften`` takes at a time: what it costs beside their exponentials is as much as those of 16."""


@intrinsic  # type: ignore[untyped-decorator]
def soften(typing: Any, x: Any, at: Any, count: Any, top_at: Any, sum_at: Any) -> Any:
    """A step of a softmax that takes 64 scores at a time, of which the first ``count`` are real. ``x[top_at]`` becomes the largest
    so far; the scores at ``x[at:]`` become e to the (score - largest), or 0 where they are not real, and are added to
    ``x[sum_at]``. Returns by how much that sum shrank before, and whatever else was summed with such weights must."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = array_data(context, builder, x, args[0])
        lanes = ir.VectorType(INT32, LANES)
        count = builder.trunc(args[2], INT32)
        limit = builder.shuffle_vector(
            builder.insert_element(ir.Constant(lanes, ir.Undefined), count, ir.Constant(INT32, 0)),
            ir.Constant(lanes, ir.Undefined),
            ir.Constant(lanes, [0] * LANES),
        )
        places = [builder.add(args[1], ir.Constant(INDEX, first)) for first in range(0, SOFTENED, LANES)]
        scores = []
        for part, place in enumerate(places):
            number = ir.Constant(lanes, [part * LANES + lane for lane in range(LANES)])
            real = builder.icmp_signed("<", number, limit)
            scores.append(builder.select(real, load_vector(builder, x, data, place), _constant(VECTOR, float("-inf"))))
        before, total_before = load(builder, x, data, args[3]), load(builder, x, data, args[4])
        top = _larger(builder, before, fold_lanes(builder, _paired(builder, scores, _larger), _larger))
        weights = [_exp(builder, builder.fsub(score, splat(builder, top))) for score in scores]
        for weight, place in zip(weights, places, strict=True):
            store_vector(builder, weight, data, place)
        shrink = _exp(builder, builder.fsub(before, top))
        added = fold_lanes(builder, _paired(builder, weights, _sum), _sum)
        store(builder, top, data, args[3])
        store(builder, builder.fadd(builder.fmul(total_before, shrink), added), data, args[4])
        return shrink

    return types.float32(x, types.intp, types.intp, types.intp, types.intp), generate


@intrinsic  # type: ignore[untyped-decorator]
def multiply_all(typing: Any, x: Any, at: Any, count: Any, factor: Any) -> Any:
    """``x[i] *= factor`` over ``x[at : at + count]``, float32."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = array_data(context, builder, x, args[0])

        def body(k: Any, load: Any, store: Any) -> None:
            place = builder.add(args[1], k)
            value = load(builder, x, data, place)
            store(builder, builder.fmul(value, _spread(builder, args[3], value)), data, place)

        _for_each(builder, args[2], body)
        return context.get_dummy_value()

    return types.void(x, types.intp, types.intp, types.float32), generate


@intrinsic  # type: ignore[untyped-decorator]
def gate_all(typing: Any, y: Any, y_at: Any, gate: Any, gate_at: Any, count: Any) -> Any:
    """``y[y_at + i] *= silu(gate[gate_at + i])`` for ``i < count``, float32."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        y_data, gate_data = array_data(context, builder, y, args[0]), array_data(context, builder, gate, args[2])

        def body(k: Any, load: Any, store: Any) -> None:
            place = builder.add(args[1], k)
            gated = _silu(builder, load(builder, gate, gate_data, builder.add(args[3], k)))
            store(builder, builder.fmul(gated, load(builder, y, y_data, place)), y_data, place)

        _for_each(builder, args[4], body)
        return context.get_dummy_value()

    return types.void(y, types.intp, gate, types.intp, types.intp), generate


@intrinsic  # type: ignore[untyped-decorator]
def largest(typing: Any, x: Any, at: Any, count: Any) -> Any:
    """The largest of ``x[at : at + count]``, float32; -inf for none. NaN is not looked for."""
    return types.float32(x, types.intp, types.intp), _reduction(x, float("-inf"), _larger)


@intrinsic  # type: ignore[untyped-decorator]
def total(typing: Any, x: Any, at: Any, count: Any) -> Any:
    """The sum of ``x[at : at + count]``, float32: 16 lanes, the tree over them, then what is left, in order."""
    return types.float32(x, types.intp, types.intp), _reduction(x, 0.0, _sum)


def _larger(builder: Any, a: Any, b: Any) -> Any:
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


def _sum(builder: Any, a: Any, b: Any) -> Any:
    return builder.fadd(a, b)


def _paired(builder: Any, four: list[Any], combine: Callable[[Any, Any, Any], Any]) -> Any:
    return combine(builder, combine(builder, four[0], four[1]), combine(builder, four[2], four[3]))


def _reduction(x: Any, start: float, combine: Callable[[Any, Any, Any], Any]) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data, at, count = array_data(context, builder, x, args[0]), args[1], args[2]
        whole = builder.and_(count, ir.Constant(INDEX, -LANES))

        def block(k: Any, carried: list[Any]) -> list[Any]:
            return [combine(builder, carried[0], load_vector(builder, x, data, builder.add(at, k)))]

        def tail(k: Any, carried: list[Any]) -> list[Any]:
            return [combine(builder, carried[0], load(builder, x, data, builder.add(at, k)))]

        (lanes,) = loop(builder, ir.Constant(INDEX, 0), whole, LANES, [ir.Constant(VECTOR, [start] * LANES)], block)
        (result,) = loop(builder, whole, count, 1, [fold_lanes(builder, lanes, combine)], tail)
        return result

    return generate


@intrinsic  # type: ignore[untyped-decorator]
def prefetch(typing: Any, array: Any, at: Any) -> Any:
    """Ask for the cache line of ``array[at]``, which need not exist, into the second cache."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        prefetch_line(builder, builder.gep(array_data(context, builder, array, args[0]), [args[1]]), 0)
        return context.get_dummy_value()

    return types.void(array, types.intp), generate


@intrinsic  # type: ignore[untyped-decorator]
def touch(typing: Any, array: Any, at: Any) -> Any:
    """Read ``array[at]`` for nothing but that its neighbours come: reads in memory order wake the hardware's own prefetching, which
    ``prefetch`` does not."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        place = builder.gep(array_data(context, builder, array, args[0]), [args[1]])
        bits = ir.IntType(array.dtype.bitwidth)
        # Not unordered, so that it stays though nobody uses the result.
        builder.load_atomic(builder.bitcast(place, bits.as_pointer()), "monotonic", array.dtype.bitwidth // 8, typ=bits)
        return context.get_dummy_value()

    return types.void(array, types.intp), generate


@intrinsic  # type: ignore[untyped-decorator]
def nanoseconds(typing: Any) -> Any:
    """The monotonic clock (``clock_gettime``), where Python's cannot be asked."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        stamp = ir.LiteralStructType([INDEX, INDEX])
        place = cgutils.alloca_once(builder, stamp)
        called = ir.FunctionType(INT32, [INT32, stamp.as_pointer()])
        builder.call(
            cgutils.get_or_insert_function(builder.module, called, "clock_gettime"), [ir.Constant(INT32, _MONOTONIC), place]
        )
        seconds, rest = (builder.load(cgutils.gep_inbounds(builder, place, 0, i)) for i in (0, 1))
        return builder.add(builder.mul(seconds, ir.Constant(INDEX, 10**9)), rest)

    return types.int64(), generate


@intrinsic  # type: ignore[untyped-decorator]
def fma(typing: Any, a: Any, b: Any, c: Any) -> Any:
    """a · b + c, rounded once, in float32; the same bits in a vector and in its remainder."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return fma_of(builder, *args)

    return types.float32(types.float32, types.float32, types.float32), generate


@intrinsic  # type: ignore[untyped-decorator]
def float_from_bits(typing: Any, bits: Any) -> Any:
    """The float32 whose bits are the given int32."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], FLOAT)

    return types.float32(types.int32), generate
