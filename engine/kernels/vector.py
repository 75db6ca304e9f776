"""Blocks of multiply-adds: products with a panel, weighted sums, dot products. Their order of operations is fixed.

Flat arrays and offsets (in elements) instead of views: making a numba array view costs more than a short dot product.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from engine.kernels.integers import integer_sums
from engine.kernels.llvm import (
    INDEX,
    INT32,
    LANES,
    VECTOR,
    array_data,
    fma_of,
    load,
    load_vector,
    loop,
    splat,
    store_vector,
    sum_lanes,
)

_UNROLLED = 4  #: steps of a tile's inner loop


def row_offsets(builder: Any, offset: Any, stride: Any, count: int) -> list[Any]:
    return [builder.add(offset, builder.mul(stride, ir.Constant(INDEX, i))) for i in range(count)]


@intrinsic  # type: ignore[untyped-decorator]
def dot(typing: Any, x: Any, x_at: Any, y: Any, y_at: Any, length: Any) -> Any:
    """The sum of ``x[x_at + i] · y[y_at + i]`` for i < length: 16 chains, the tree over them, then what is left."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        x_data, y_data = (array_data(context, builder, signature.args[i], args[i]) for i in (0, 2))
        whole = builder.and_(args[4], ir.Constant(INDEX, -LANES))

        def add(read: Any) -> Any:
            def step(k: Any, sums: list[Any]) -> list[Any]:
                pair = read(builder, x, x_data, builder.add(args[1], k)), read(builder, y, y_data, builder.add(args[3], k))
                return [fma_of(builder, *pair, sums[0])]

            return step

        zeros = ir.Constant(VECTOR, [0.0] * LANES)
        (lanes,) = loop(builder, ir.Constant(INDEX, 0), whole, LANES, [zeros], add(load_vector))
        (result,) = loop(builder, whole, args[4], 1, [sum_lanes(builder, lanes)], add(load))
        return result

    return types.float32(x, types.intp, y, types.intp, types.intp), generate


def make_weighted_sums(rows: int, vectors: int) -> Any:
    """``weighted_sums(p, p_at, p_stride, v, offsets, first, v_at, count, y, y_at, y_stride)`` for rows × (vectors · 16) sums.

    Adds to ``y[y_at + r·y_stride + d]``, for s = 0, 1, ... count - 1 in this order, ``p[p_at + r·p_stride + s] · v[offsets[first +
    s] + v_at + d]``.
    """

    @intrinsic  # type: ignore[untyped-decorator]
    def weighted_sums(
        typing: Any,
        p: Any,
        p_at: Any,
        p_stride: Any,
        v: Any,
        offsets: Any,
        first: Any,
        v_at: Any,
        count: Any,
        y: Any,
        y_at: Any,
        y_stride: Any,
    ) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            p_data, v_data, places_data, y_data = (array_data(context, builder, signature.args[i], args[i]) for i in (0, 3, 4, 8))
            p_rows = row_offsets(builder, args[1], args[2], rows)
            y_rows = row_offsets(builder, args[9], args[10], rows)
            places = [builder.add(at, ir.Constant(INDEX, LANES * i)) for at in y_rows for i in range(vectors)]

            def slot(s: Any, sums: list[Any]) -> list[Any]:
                at = builder.add(builder.load(builder.gep(places_data, [builder.add(args[5], s)])), args[6])
                values = [load_vector(builder, v, v_data, builder.add(at, ir.Constant(INDEX, LANES * i))) for i in range(vectors)]
                weights = [splat(builder, load(builder, p, p_data, builder.add(row, s))) for row in p_rows]
                return [fma_of(builder, weights[i // vectors], values[i % vectors], total) for i, total in enumerate(sums)]

            before = [load_vector(builder, y, y_data, place) for place in places]
            for total, place in zip(loop(builder, ir.Constant(INDEX, 0), args[7], 1, before, slot), places, strict=True):
                store_vector(builder, total, y_data, place)
            return context.get_dummy_value()

        index = types.intp
        return types.void(p, index, index, v, offsets, index, index, index, y, index, index), generate

    return weighted_sums


def make_tile(rows: int, vectors: int) -> Any:
    """``tile(x, x_at, x_stride, w, w_at, length, scale, scale_at, y, y_at, y_stride, add)`` for rows × (vectors · 16) outputs.

    ``w[w_at :]`` is a panel, [length, vectors · 16]: the weights of neighbouring outputs side by side. Sets ``y[y_at + r·y_stride +
    o]`` to the sum over k = 0, 1, ... length - 1, in this order, of ``x[x_at + r·x_stride + k] · w[w_at + k·vectors·16 + o]``: one
    chain of fused multiply-adds for each result, whatever the tile; times ``scale[scale_at + o]``, and plus what ``y`` was if
    ``add``. A panel of int8 takes rows as ``integers.prepare_row`` leaves them, and ``integers.integer_sums`` of them.
    """

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
            x_rows = row_offsets(builder, args[1], args[2], rows)

            if w.dtype == types.int8:
                sums = integer_sums(builder, x, x_data, x_rows, w_data, args[4], args[5], vectors)
            else:
                sums = _float_sums(builder, x, x_data, x_rows, w, w_data, args[4], args[5], vectors)
            offsets = [ir.Constant(INDEX, LANES * i) for i in range(vectors)]
            scales = [load_vector(builder, scale, scale_data, builder.add(args[7], offset)) for offset in offsets]
            results = [builder.fmul(value, scales[i % vectors]) for i, value in enumerate(sums)]
            places = [builder.add(at, offset) for at in row_offsets(builder, args[9], args[10], rows) for offset in offsets]
            with builder.if_else(builder.trunc(args[11], ir.IntType(1))) as (adding, setting):
                with adding:
                    for value, place in zip(results, places, strict=True):
                        store_vector(builder, builder.fadd(load_vector(builder, y, y_data, place), value), y_data, place)
                with setting:
                    for value, place in zip(results, places, strict=True):
                        store_vector(builder, value, y_data, place)
            return context.get_dummy_value()

        index = types.intp
        return types.void(x, index, index, w, index, index, scale, index, y, index, index, types.boolean), generate

    return tile


def _float_sums(
    builder: Any, x: Any, x_data: Any, x_rows: list[Any], w: Any, w_data: Any, w_at: Any, length: Any, vectors: int
) -> list[Any]:
    """Sums of products of float32 rows with a panel: for each row, ``vectors`` vectors."""
    width = vectors * LANES

    def step(k: Any, sums: list[Any]) -> list[Any]:
        at = builder.add(w_at, builder.mul(k, ir.Constant(INDEX, width)))
        ws = [load_vector(builder, w, w_data, builder.add(at, ir.Constant(INDEX, LANES * i))) for i in range(vectors)]
        xs = [splat(builder, load(builder, x, x_data, builder.add(row, k))) for row in x_rows]
        return [fma_of(builder, xs[i // vectors], ws[i % vectors], total) for i, total in enumerate(sums)]

    def steps(k: Any, sums: list[Any]) -> list[Any]:
        for i in range(_UNROLLED):
            sums = step(builder.add(k, ir.Constant(INDEX, i)), sums)
        return sums

    zeros = [ir.Constant(VECTOR, [0.0] * LANES)] * (len(x_rows) * vectors)
    whole = builder.and_(length, ir.Constant(INDEX, -_UNROLLED))
    sums = loop(builder, ir.Constant(INDEX, 0), whole, _UNROLLED, zeros, steps)
    return loop(builder, whole, length, 1, sums, step)


@intrinsic  # type: ignore[untyped-decorator]
def turn_block(typing: Any, x: Any, offsets: Any, first: Any, x_at: Any, y: Any, y_at: Any, y_stride: Any) -> Any:
    """``y[y_at + i·y_stride + j] = x[offsets[first + j] + x_at + i]`` for i and j < 16; ``y`` float32."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        x_data, places, y_data = (array_data(context, builder, signature.args[i], args[i]) for i in (0, 1, 4))
        starts = [builder.load(builder.gep(places, [builder.add(args[2], ir.Constant(INDEX, j))])) for j in range(LANES)]
        rows = [load_vector(builder, x, x_data, builder.add(start, args[3])) for start in starts]
        half = LANES // 2
        # Four times: row i beside row i + 8, element by element. Each time moves one bit of an element's index to its row's.
        for _ in range(4):
            rows = [
                builder.shuffle_vector(rows[i], rows[i + half], ir.Constant(ir.VectorType(INT32, LANES), order))
                for i in range(half)
                for order in (_INTERLEAVED[:LANES], _INTERLEAVED[LANES:])
            ]
        for row, at in zip(rows, row_offsets(builder, args[5], args[6], LANES), strict=True):
            store_vector(builder, row, y_data, at)
        return context.get_dummy_value()

    return types.void(x, offsets, types.intp, types.intp, y, types.intp, types.intp), generate


_INTERLEAVED = [lane + side * LANES for lane in range(LANES) for side in (0, 1)]
