"""Blocks of arithmetic written directly in LLVM's language, so that their order of operations is ours and not the vectoriser's.

Flat arrays and offsets (in elements) instead of views: making a numba array view costs more than a short dot product.

Arithmetic is float32; what is read may be stored narrower, and numba has no types for that, so an array's integer type says what
its bits are: **uint16 is bfloat16, int16 is float16, int8 is an integer**. Widening any of them is exact.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

LANES = 16
_MONOTONIC = time.CLOCK_MONOTONIC
_UNROLLED = 4  #: steps of a tile's inner loop
_F32 = ir.FloatType()
_VECTOR = ir.VectorType(_F32, LANES)
_INDEX = ir.IntType(64)
_I32 = ir.IntType(32)
_HALF_BITS = ir.Constant(_I32, 16)


def _fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    suffix = f"v{LANES}f32" if a.type == _VECTOR else "f32"
    signature = ir.FunctionType(a.type, [a.type] * 3)
    return builder.call(cgutils.get_or_insert_function(builder.module, signature, f"llvm.fma.{suffix}"), [a, b, c])


def _widen(builder: Any, array_type: Any, stored: Any) -> Any:
    """What was loaded from an array of ``array_type``, one element or a vector, as float32."""
    if array_type.dtype == types.float32:
        return stored

    def like(element: Any) -> Any:
        return ir.VectorType(element, LANES) if isinstance(stored.type, ir.VectorType) else element

    if array_type.dtype == types.uint16:
        sixteen = ir.Constant(like(_I32), [16] * LANES) if isinstance(stored.type, ir.VectorType) else _HALF_BITS
        return builder.bitcast(builder.shl(builder.zext(stored, like(_I32)), sixteen), like(_F32))
    if array_type.dtype == types.int16:
        return builder.fpext(builder.bitcast(stored, like(ir.HalfType())), like(_F32))
    if array_type.dtype == types.int8:
        return builder.sitofp(builder.sext(stored, like(_I32)), like(_F32))
    raise TypeError(f"kernels read float32, uint16 (bfloat16), int16 (float16) and int8, not {array_type.dtype}")


def _load_vector(builder: Any, array_type: Any, data: Any, offset: Any) -> Any:
    element = data.type.pointee
    vector = ir.VectorType(element, LANES)
    pointer = builder.bitcast(builder.gep(data, [offset]), vector.as_pointer())
    return _widen(builder, array_type, builder.load(pointer, align=array_type.dtype.bitwidth // 8, typ=vector))


def _store_vector(builder: Any, value: Any, data: Any, offset: Any) -> None:
    builder.store(value, builder.bitcast(builder.gep(data, [offset]), _VECTOR.as_pointer()), align=4)


def _store(builder: Any, value: Any, data: Any, offset: Any) -> None:
    builder.store(value, builder.gep(data, [offset]), align=4)


def _load(builder: Any, array_type: Any, data: Any, offset: Any) -> Any:
    return _widen(builder, array_type, builder.load(builder.gep(data, [offset]), align=array_type.dtype.bitwidth // 8))


def _splat(builder: Any, value: Any) -> Any:
    single = builder.insert_element(ir.Constant(_VECTOR, ir.Undefined), value, ir.Constant(ir.IntType(32), 0))
    return builder.shuffle_vector(
        single, ir.Constant(_VECTOR, ir.Undefined), ir.Constant(ir.VectorType(ir.IntType(32), LANES), [0] * LANES)
    )


def _sum_lanes(builder: Any, vector: Any) -> Any:
    return _fold_lanes(builder, vector, lambda builder, a, b: builder.fadd(a, b))


def _fold_lanes(builder: Any, vector: Any, combine: Callable[[Any, Any, Any], Any]) -> Any:
    """Lane i with lane i + half, then again with half as many: the one tree that every reduction here ends with."""
    width = LANES
    while width > 1:
        width //= 2
        index = ir.VectorType(ir.IntType(32), width)
        low = builder.shuffle_vector(vector, vector, ir.Constant(index, list(range(width))))
        high = builder.shuffle_vector(vector, vector, ir.Constant(index, list(range(width, 2 * width))))
        vector = combine(builder, low, high)
    return builder.extract_element(vector, ir.Constant(ir.IntType(32), 0))


def _loop(
    builder: Any, start: Any, stop: Any, step: int, carried: Sequence[Any], body: Callable[[Any, list[Any]], list[Any]]
) -> list[Any]:
    """``for k in range(start, stop, step): carried = body(k, carried)``; returns what is carried at the end."""
    before = builder.block
    head, inside, after = (builder.append_basic_block(name) for name in ("head", "inside", "after"))
    builder.branch(head)
    builder.position_at_end(head)
    k = builder.phi(_INDEX)
    values = [builder.phi(value.type) for value in carried]
    builder.cbranch(builder.icmp_signed("<", k, stop), inside, after)
    builder.position_at_end(inside)
    results = body(k, list(values))
    following = builder.add(k, ir.Constant(_INDEX, step))
    for phi, first, again in zip([k, *values], [start, *carried], [following, *results], strict=True):
        phi.add_incoming(first, before)
        phi.add_incoming(again, builder.block)
    builder.branch(head)
    builder.position_at_end(after)
    return list(values)


def array_data(context: Any, builder: Any, array_type: Any, value: Any) -> Any:
    return context.make_array(array_type)(context, builder, value).data


def _row_offsets(builder: Any, offset: Any, stride: Any, count: int) -> list[Any]:
    return [builder.add(offset, builder.mul(stride, ir.Constant(_INDEX, i))) for i in range(count)]


def make_dots(rows: int, outputs: int) -> Any:
    """``dots(x, x_at, x_stride, w, w_at, w_stride, length, y, y_at, y_stride)`` for a tile of rows × outputs.

    Sets ``y[y_at + r·y_stride + c]`` to the dot product of ``x[x_at + r·x_stride :][:length]`` and ``w[w_at + c·w_stride
    :][:length]``. The order of operations in each product is the same for every tile size.
    """

    @intrinsic  # type: ignore[untyped-decorator]
    def dots(
        typing: Any,
        x: Any,
        x_at: Any,
        x_stride: Any,
        w: Any,
        w_at: Any,
        w_stride: Any,
        length: Any,
        y: Any,
        y_at: Any,
        y_stride: Any,
    ) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            x_data, w_data, y_data = (array_data(context, builder, signature.args[i], args[i]) for i in (0, 3, 7))
            x_rows = _row_offsets(builder, args[1], args[2], rows)
            w_rows = _row_offsets(builder, args[4], args[5], outputs)
            whole = builder.and_(args[6], ir.Constant(_INDEX, -LANES))

            def block(k: Any, sums: list[Any]) -> list[Any]:
                xs = [_load_vector(builder, x, x_data, builder.add(at, k)) for at in x_rows]
                ws = [_load_vector(builder, w, w_data, builder.add(at, k)) for at in w_rows]
                return [_fma(builder, xs[i // outputs], ws[i % outputs], total) for i, total in enumerate(sums)]

            def tail(k: Any, sums: list[Any]) -> list[Any]:
                xs = [_load(builder, x, x_data, builder.add(at, k)) for at in x_rows]
                ws = [_load(builder, w, w_data, builder.add(at, k)) for at in w_rows]
                return [_fma(builder, xs[i // outputs], ws[i % outputs], total) for i, total in enumerate(sums)]

            zeros = [ir.Constant(_VECTOR, [0.0] * LANES)] * (rows * outputs)
            vectors = _loop(builder, ir.Constant(_INDEX, 0), whole, LANES, zeros, block)
            totals = _loop(builder, whole, args[6], 1, [_sum_lanes(builder, vector) for vector in vectors], tail)
            for r, at in enumerate(_row_offsets(builder, args[8], args[9], rows)):
                for c in range(outputs):
                    builder.store(totals[r * outputs + c], builder.gep(y_data, [builder.add(at, ir.Constant(_INDEX, c))]), align=4)
            return context.get_dummy_value()

        index = types.intp
        return types.void(x, index, index, w, index, index, index, y, index, index), generate

    return dots


def make_weighted_sums(rows: int, vectors: int) -> Any:
    """``weighted_sums(p, p_at, p_stride, v, v_at, v_stride, count, y, y_at, y_stride)`` for rows × (vectors · 16) sums.

    Adds to ``y[y_at + r·y_stride + d]``, for s = 0, 1, ... count - 1 in this order, ``p[p_at + r·p_stride + s] · v[v_at +
    s·v_stride + d]``.
    """

    @intrinsic  # type: ignore[untyped-decorator]
    def weighted_sums(
        typing: Any,
        p: Any,
        p_at: Any,
        p_stride: Any,
        v: Any,
        v_at: Any,
        v_stride: Any,
        count: Any,
        y: Any,
        y_at: Any,
        y_stride: Any,
    ) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            p_data, v_data, y_data = (array_data(context, builder, signature.args[i], args[i]) for i in (0, 3, 7))
            p_rows = _row_offsets(builder, args[1], args[2], rows)
            y_rows = _row_offsets(builder, args[8], args[9], rows)
            places = [builder.add(at, ir.Constant(_INDEX, LANES * i)) for at in y_rows for i in range(vectors)]

            def slot(s: Any, sums: list[Any]) -> list[Any]:
                at = builder.add(args[4], builder.mul(s, args[5]))
                values = [_load_vector(builder, v, v_data, builder.add(at, ir.Constant(_INDEX, LANES * i))) for i in range(vectors)]
                weights = [_splat(builder, _load(builder, p, p_data, builder.add(row, s))) for row in p_rows]
                return [_fma(builder, weights[i // vectors], values[i % vectors], total) for i, total in enumerate(sums)]

            before = [_load_vector(builder, y, y_data, place) for place in places]
            for total, place in zip(_loop(builder, ir.Constant(_INDEX, 0), args[6], 1, before, slot), places, strict=True):
                _store_vector(builder, total, y_data, place)
            return context.get_dummy_value()

        index = types.intp
        return types.void(p, index, index, v, index, index, index, y, index, index), generate

    return weighted_sums


def make_tile(rows: int, vectors: int) -> Any:
    """``tile(x, x_at, x_stride, w, w_at, length, scale, scale_at, y, y_at, y_stride, add)`` for rows × (vectors · 16) outputs.

    ``w[w_at :]`` is a panel, [length, vectors · 16]: the weights of neighbouring outputs side by side. Sets ``y[y_at + r·y_stride +
    o]`` to the sum over k = 0, 1, ... length - 1, in this order, of ``x[x_at + r·x_stride + k] · w[w_at + k·vectors·16 + o]``: one
    chain of fused multiply-adds for each result, whatever the tile; times ``scale[scale_at + o]``, and plus what ``y`` was if
    ``add``.
    """
    width = vectors * LANES

    @intrinsic  # type: ignore[untyped-decorator]
    def tile(
        typing: Any,
        x: Any,
        x_at: Any,
        x_stride: Any,
        w: Any,
        w_at: Any,
        length: Any,
        scale: Any,
        scale_at: Any,
        y: Any,
        y_at: Any,
        y_stride: Any,
        add: Any,
    ) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            x_data, w_data, scale_data, y_data = (array_data(context, builder, signature.args[i], args[i]) for i in (0, 3, 6, 8))
            x_rows = _row_offsets(builder, args[1], args[2], rows)

            def step(k: Any, sums: list[Any]) -> list[Any]:
                at = builder.add(args[4], builder.mul(k, ir.Constant(_INDEX, width)))
                ws = [_load_vector(builder, w, w_data, builder.add(at, ir.Constant(_INDEX, LANES * i))) for i in range(vectors)]
                xs = [_splat(builder, _load(builder, x, x_data, builder.add(row, k))) for row in x_rows]
                return [_fma(builder, xs[i // vectors], ws[i % vectors], total) for i, total in enumerate(sums)]

            def steps(k: Any, sums: list[Any]) -> list[Any]:
                for i in range(_UNROLLED):
                    sums = step(builder.add(k, ir.Constant(_INDEX, i)), sums)
                return sums

            zeros = [ir.Constant(_VECTOR, [0.0] * LANES)] * (rows * vectors)
            whole = builder.and_(args[5], ir.Constant(_INDEX, -_UNROLLED))
            sums = _loop(builder, ir.Constant(_INDEX, 0), whole, _UNROLLED, zeros, steps)
            sums = _loop(builder, whole, args[5], 1, sums, step)
            offsets = [ir.Constant(_INDEX, LANES * i) for i in range(vectors)]
            scales = [_load_vector(builder, scale, scale_data, builder.add(args[7], offset)) for offset in offsets]
            results = [builder.fmul(value, scales[i % vectors]) for i, value in enumerate(sums)]
            places = [builder.add(at, offset) for at in _row_offsets(builder, args[9], args[10], rows) for offset in offsets]
            with builder.if_else(builder.trunc(args[11], ir.IntType(1))) as (adding, setting):
                with adding:
                    for value, place in zip(results, places, strict=True):
                        _store_vector(builder, builder.fadd(_load_vector(builder, y, y_data, place), value), y_data, place)
                with setting:
                    for value, place in zip(results, places, strict=True):
                        _store_vector(builder, value, y_data, place)
            return context.get_dummy_value()

        index = types.intp
        return types.void(x, index, index, w, index, index, scale, index, y, index, index, types.boolean), generate

    return tile


@intrinsic  # type: ignore[untyped-decorator]
def load_element(typing: Any, array: Any, at: Any) -> Any:
    """``array[at]`` as float32, from any of the types that kernels read."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _load(builder, array, array_data(context, builder, array, args[0]), args[1])

    return types.float32(array, types.intp), generate


@intrinsic  # type: ignore[untyped-decorator]
def store_element(typing: Any, array: Any, at: Any, value: Any) -> Any:
    """``array[at] = value``, a float32 rounded to the nearest that a float32, bfloat16 or float16 array holds, ties to even."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        place = builder.gep(array_data(context, builder, array, args[0]), [args[1]])
        builder.store(_narrow(builder, array, args[2]), place, align=array.dtype.bitwidth // 8)
        return context.get_dummy_value()

    return types.void(array, types.intp, types.float32), generate


def _narrow(builder: Any, array_type: Any, value: Any) -> Any:
    if array_type.dtype == types.float32:
        return value
    if array_type.dtype == types.int16:
        return builder.bitcast(builder.fptrunc(value, ir.HalfType()), ir.IntType(16))
    if array_type.dtype == types.uint16:
        bits = builder.bitcast(value, _I32)
        odd = builder.and_(builder.lshr(bits, _HALF_BITS), ir.Constant(_I32, 1))
        rounded = builder.lshr(builder.add(bits, builder.add(odd, ir.Constant(_I32, 0x7FFF))), _HALF_BITS)
        # Rounding a NaN's bits could carry into infinity: keep its upper half, made quiet.
        quiet = builder.or_(builder.lshr(bits, _HALF_BITS), ir.Constant(_I32, 0x40))
        return builder.trunc(builder.select(builder.fcmp_unordered("uno", value, value), quiet, rounded), ir.IntType(16))
    raise TypeError(f"kernels write float32, uint16 (bfloat16) and int16 (float16), not {array_type.dtype}")


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
    n = builder.fsub(_fma(builder, bounded, number(1.4426950408889634), magic), magic)
    r = _fma(builder, n, number(2.12194440e-4), _fma(builder, n, number(-0.693359375), bounded))
    p = number(1.9875691500e-4)
    for coefficient in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        p = _fma(builder, p, r, number(coefficient))
    value = _fma(builder, p, builder.fmul(r, r), builder.fadd(r, one))
    integer = ir.VectorType(_I32, LANES) if isinstance(x.type, ir.VectorType) else _I32
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
    whole = builder.and_(count, ir.Constant(_INDEX, -LANES))

    def with_vectors(k: Any, carried: list[Any]) -> list[Any]:
        body(k, _load_vector, _store_vector)
        return []

    def with_numbers(k: Any, carried: list[Any]) -> list[Any]:
        body(k, _load, _store)
        return []

    _loop(builder, ir.Constant(_INDEX, 0), whole, LANES, [], with_vectors)
    _loop(builder, whole, count, 1, [], with_numbers)


def _spread(builder: Any, number: Any, like: Any) -> Any:
    return _splat(builder, number) if isinstance(like.type, ir.VectorType) else number


@intrinsic  # type: ignore[untyped-decorator]
def exp_all(typing: Any, x: Any, at: Any, count: Any, top: Any, scaling: Any) -> Any:
    """``x[i] = exp((x[i] - top) · scaling)`` over ``x[at : at + count]``, float32."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = array_data(context, builder, x, args[0])

        def body(k: Any, load: Any, store: Any) -> None:
            place = builder.add(args[1], k)
            value = load(builder, x, data, place)
            shifted = builder.fsub(value, _spread(builder, args[3], value))
            store(builder, _exp(builder, builder.fmul(shifted, _spread(builder, args[4], value))), data, place)

        _for_each(builder, args[2], body)
        return context.get_dummy_value()

    return types.void(x, types.intp, types.intp, types.float32, types.float32), generate


@intrinsic  # type: ignore[untyped-decorator]
def widen_all(typing: Any, x: Any, x_at: Any, y: Any, y_at: Any, count: Any) -> Any:
    """``y[y_at + i] = x[x_at + i]`` for ``i < count``; ``x`` of any type that kernels read, ``y`` float32."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        x_data, y_data = array_data(context, builder, x, args[0]), array_data(context, builder, y, args[2])

        def body(k: Any, load: Any, store: Any) -> None:
            store(builder, load(builder, x, x_data, builder.add(args[1], k)), y_data, builder.add(args[3], k))

        _for_each(builder, args[4], body)
        return context.get_dummy_value()

    return types.void(x, types.intp, y, types.intp, types.intp), generate


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
    return types.float32(x, types.intp, types.intp), _reduction(x, 0.0, lambda builder, a, b: builder.fadd(a, b))


def _larger(builder: Any, a: Any, b: Any) -> Any:
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


def _reduction(x: Any, start: float, combine: Callable[[Any, Any, Any], Any]) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data, at, count = array_data(context, builder, x, args[0]), args[1], args[2]
        whole = builder.and_(count, ir.Constant(_INDEX, -LANES))

        def block(k: Any, carried: list[Any]) -> list[Any]:
            return [combine(builder, carried[0], _load_vector(builder, x, data, builder.add(at, k)))]

        def tail(k: Any, carried: list[Any]) -> list[Any]:
            return [combine(builder, carried[0], _load(builder, x, data, builder.add(at, k)))]

        (lanes,) = _loop(builder, ir.Constant(_INDEX, 0), whole, LANES, [ir.Constant(_VECTOR, [start] * LANES)], block)
        (result,) = _loop(builder, whole, count, 1, [_fold_lanes(builder, lanes, combine)], tail)
        return result

    return generate


@intrinsic  # type: ignore[untyped-decorator]
def prefetch(typing: Any, array: Any, at: Any) -> Any:
    """Ask for the cache line of ``array[at]``, which need not exist, into the second cache."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        byte = ir.IntType(8).as_pointer()
        place = builder.bitcast(builder.gep(array_data(context, builder, array, args[0]), [args[1]]), byte)
        function = ir.FunctionType(ir.VoidType(), [byte, _I32, _I32, _I32])
        read, second, data = ir.Constant(_I32, 0), ir.Constant(_I32, 2), ir.Constant(_I32, 1)
        builder.call(cgutils.get_or_insert_function(builder.module, function, "llvm.prefetch.p0"), [place, read, second, data])
        return context.get_dummy_value()

    return types.void(array, types.intp), generate


@intrinsic  # type: ignore[untyped-decorator]
def nanoseconds(typing: Any) -> Any:
    """The monotonic clock (``clock_gettime``), where Python's cannot be asked."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        stamp = ir.LiteralStructType([_INDEX, _INDEX])
        place = cgutils.alloca_once(builder, stamp)
        called = ir.FunctionType(_I32, [_I32, stamp.as_pointer()])
        builder.call(
            cgutils.get_or_insert_function(builder.module, called, "clock_gettime"), [ir.Constant(_I32, _MONOTONIC), place]
        )
        seconds, rest = (builder.load(cgutils.gep_inbounds(builder, place, 0, i)) for i in (0, 1))
        return builder.add(builder.mul(seconds, ir.Constant(_INDEX, 10**9)), rest)

    return types.int64(), generate


@intrinsic  # type: ignore[untyped-decorator]
def fma(typing: Any, a: Any, b: Any, c: Any) -> Any:
    """a · b + c, rounded once, in float32; the same bits in a vector and in its remainder."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _fma(builder, *args)

    return types.float32(types.float32, types.float32, types.float32), generate


@intrinsic  # type: ignore[untyped-decorator]
def float_from_bits(typing: Any, bits: Any) -> Any:
    """The float32 whose bits are the given int32."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], _F32)

    return types.float32(types.int32), generate
