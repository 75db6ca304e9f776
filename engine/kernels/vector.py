"""Blocks of multiply-adds: tiles of dot products, of products with a panel, of weighted sums. Their order of operations is fixed.

Flat arrays and offsets (in elements) instead of views: making a numba array view costs more than a short dot product.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from engine.kernels.integers import integer_sums
from engine.kernels.llvm import INDEX, LANES, VECTOR, array_data, fma_of, load, load_vector, loop, splat, store_vector, sum_lanes

_UNROLLED = 4  #: steps of a tile's inner loop


def row_offsets(builder: Any, offset: Any, stride: Any, count: int) -> list[Any]:
    return [builder.add(offset, builder.mul(stride, ir.Constant(INDEX, i))) for i in range(count)]


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
            x_rows = row_offsets(builder, args[1], args[2], rows)
            w_rows = row_offsets(builder, args[4], args[5], outputs)
            whole = builder.and_(args[6], ir.Constant(INDEX, -LANES))

            def block(k: Any, sums: list[Any]) -> list[Any]:
                xs = [load_vector(builder, x, x_data, builder.add(at, k)) for at in x_rows]
                ws = [load_vector(builder, w, w_data, builder.add(at, k)) for at in w_rows]
                return [fma_of(builder, xs[i // outputs], ws[i % outputs], total) for i, total in enumerate(sums)]

            def tail(k: Any, sums: list[Any]) -> list[Any]:
                xs = [load(builder, x, x_data, builder.add(at, k)) for at in x_rows]
                ws = [load(builder, w, w_data, builder.add(at, k)) for at in w_rows]
                return [fma_of(builder, xs[i // outputs], ws[i % outputs], total) for i, total in enumerate(sums)]

            zeros = [ir.Constant(VECTOR, [0.0] * LANES)] * (rows * outputs)
            vectors = loop(builder, ir.Constant(INDEX, 0), whole, LANES, zeros, block)
            totals = loop(builder, whole, args[6], 1, [sum_lanes(builder, vector) for vector in vectors], tail)
            for r, at in enumerate(row_offsets(builder, args[8], args[9], rows)):
                for c in range(outputs):
                    builder.store(totals[r * outputs + c], builder.gep(y_data, [builder.add(at, ir.Constant(INDEX, c))]), align=4)
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
            p_rows = row_offsets(builder, args[1], args[2], rows)
            y_rows = row_offsets(builder, args[8], args[9], rows)
            places = [builder.add(at, ir.Constant(INDEX, LANES * i)) for at in y_rows for i in range(vectors)]

            def slot(s: Any, sums: list[Any]) -> list[Any]:
                at = builder.add(args[4], builder.mul(s, args[5]))
                values = [load_vector(builder, v, v_data, builder.add(at, ir.Constant(INDEX, LANES * i))) for i in range(vectors)]
                weights = [splat(builder, load(builder, p, p_data, builder.add(row, s))) for row in p_rows]
                return [fma_of(builder, weights[i // vectors], values[i % vectors], total) for i, total in enumerate(sums)]

            before = [load_vector(builder, y, y_data, place) for place in places]
            for total, place in zip(loop(builder, ir.Constant(INDEX, 0), args[6], 1, before, slot), places, strict=True):
                store_vector(builder, total, y_data, place)
            return context.get_dummy_value()

        index = types.intp
        return types.void(p, index, index, v, index, index, index, y, index, index), generate

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
