"""Blocks of arithmetic written directly in LLVM's language, so that their order of operations is ours and not the vectoriser's.

Flat arrays and offsets (in elements) instead of views: making a numba array view costs more than a short dot product.
"""

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

LANES = 16
_F32 = ir.FloatType()
_VECTOR = ir.VectorType(_F32, LANES)
_INDEX = ir.IntType(64)


def _fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    suffix = f"v{LANES}f32" if a.type == _VECTOR else "f32"
    signature = ir.FunctionType(a.type, [a.type] * 3)
    return builder.call(cgutils.get_or_insert_function(builder.module, signature, f"llvm.fma.{suffix}"), [a, b, c])


def _load_vector(builder: Any, data: Any, offset: Any) -> Any:
    pointer = builder.bitcast(builder.gep(data, [offset]), _VECTOR.as_pointer())
    return builder.load(pointer, align=4, typ=_VECTOR)


def _store_vector(builder: Any, value: Any, data: Any, offset: Any) -> None:
    builder.store(value, builder.bitcast(builder.gep(data, [offset]), _VECTOR.as_pointer()), align=4)


def _load(builder: Any, data: Any, offset: Any) -> Any:
    return builder.load(builder.gep(data, [offset]), align=4, typ=_F32)


def _splat(builder: Any, value: Any) -> Any:
    single = builder.insert_element(ir.Constant(_VECTOR, ir.Undefined), value, ir.Constant(ir.IntType(32), 0))
    return builder.shuffle_vector(
        single, ir.Constant(_VECTOR, ir.Undefined), ir.Constant(ir.VectorType(ir.IntType(32), LANES), [0] * LANES)
    )


def _sum_lanes(builder: Any, vector: Any) -> Any:
    """Lane i + lane i + half, then again with half as many: the one tree that every sum here ends with."""
    width = LANES
    while width > 1:
        width //= 2
        index = ir.VectorType(ir.IntType(32), width)
        low = builder.shuffle_vector(vector, vector, ir.Constant(index, list(range(width))))
        high = builder.shuffle_vector(vector, vector, ir.Constant(index, list(range(width, 2 * width))))
        vector = builder.fadd(low, high)
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


def _data(context: Any, builder: Any, array_type: Any, value: Any) -> Any:
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
            x_data, w_data, y_data = (_data(context, builder, signature.args[i], args[i]) for i in (0, 3, 7))
            x_rows = _row_offsets(builder, args[1], args[2], rows)
            w_rows = _row_offsets(builder, args[4], args[5], outputs)
            whole = builder.and_(args[6], ir.Constant(_INDEX, -LANES))

            def block(k: Any, sums: list[Any]) -> list[Any]:
                xs = [_load_vector(builder, x_data, builder.add(at, k)) for at in x_rows]
                ws = [_load_vector(builder, w_data, builder.add(at, k)) for at in w_rows]
                return [_fma(builder, xs[i // outputs], ws[i % outputs], total) for i, total in enumerate(sums)]

            def tail(k: Any, sums: list[Any]) -> list[Any]:
                xs = [_load(builder, x_data, builder.add(at, k)) for at in x_rows]
                ws = [_load(builder, w_data, builder.add(at, k)) for at in w_rows]
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
            p_data, v_data, y_data = (_data(context, builder, signature.args[i], args[i]) for i in (0, 3, 7))
            p_rows = _row_offsets(builder, args[1], args[2], rows)
            y_rows = _row_offsets(builder, args[8], args[9], rows)
            places = [builder.add(at, ir.Constant(_INDEX, LANES * i)) for at in y_rows for i in range(vectors)]

            def slot(s: Any, sums: list[Any]) -> list[Any]:
                at = builder.add(args[4], builder.mul(s, args[5]))
                values = [_load_vector(builder, v_data, builder.add(at, ir.Constant(_INDEX, LANES * i))) for i in range(vectors)]
                weights = [_splat(builder, _load(builder, p_data, builder.add(row, s))) for row in p_rows]
                return [_fma(builder, weights[i // vectors], values[i % vectors], total) for i, total in enumerate(sums)]

            before = [_load_vector(builder, y_data, place) for place in places]
            for total, place in zip(_loop(builder, ir.Constant(_INDEX, 0), args[6], 1, before, slot), places, strict=True):
                _store_vector(builder, total, y_data, place)
            return context.get_dummy_value()

        index = types.intp
        return types.void(p, index, index, v, index, index, index, y, index, index), generate

    return weighted_sums


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
