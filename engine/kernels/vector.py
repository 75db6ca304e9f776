"""Blocks of multiply-adds: products with a panel, weighted sums, dot products. Their order of operations is fixed.

Flat arrays and offsets (in elements) instead of views: making a numba array view costs more than a short dot product.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from engine.kernels.integers import integer_sums
from engine.kernels.llvm import (
    CACHE_LINE,
    INDEX,
    INT32,
    LANES,
    VECTOR,
    array_data,
    fma_of,
    for_count,
    load,
    load_vector,
    loop,
    prefetch_line,
    splat,
    store_vector,
    sum_lanes,
)

_UNROLLED = 4  #: steps of a tile's inner loop
_ASKED = 2  #: cache lines that an unrolled step asks for


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


def make_weighted_sums(most: int, vectors: int) -> Any:
    """``weighted_sums(rows, p, p_at, p_stride, v, offsets, first, v_at, count, y, y_at, y_stride)`` for rows × (vectors · 16) sums,
    at most ``most`` rows.

    Adds to ``y[y_at + r·y_stride + d]``, for s = 0, 1, ... count - 1 in this order, ``p[p_at + r·p_stride + s] · v[offsets[first +
    s] + v_at + d]``.
    """

    @intrinsic  # type: ignore[untyped-decorator]
    def weighted_sums(
        typing: Any,
        rows: Any,
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
            p_data, v_data, places_data, y_data = (array_data(context, builder, signature.args[i], args[i]) for i in (1, 4, 5, 9))

            def add(rows: int) -> None:
                p_rows = row_offsets(builder, args[2], args[3], rows)
                y_rows = row_offsets(builder, args[10], args[11], rows)
                places = [builder.add(at, ir.Constant(INDEX, LANES * i)) for at in y_rows for i in range(vectors)]

                def slot(s: Any, sums: list[Any]) -> list[Any]:
                    at = builder.add(builder.load(builder.gep(places_data, [builder.add(args[6], s)])), args[7])
                    values = [
                        load_vector(builder, v, v_data, builder.add(at, ir.Constant(INDEX, LANES * i))) for i in range(vectors)
                    ]
                    added = []
                    for i, row in enumerate(p_rows):
                        weight = splat(builder, load(builder, p, p_data, builder.add(row, s)))
                        added += [fma_of(builder, weight, values[j], sums[i * vectors + j]) for j in range(vectors)]
                    return added

                before = [load_vector(builder, y, y_data, place) for place in places]
                for total, place in zip(loop(builder, ir.Constant(INDEX, 0), args[8], 1, before, slot), places, strict=True):
                    store_vector(builder, total, y_data, place)

            for_count(builder, args[0], most, add)
            return context.get_dummy_value()

        index = types.intp
        return types.void(index, p, index, index, v, offsets, index, index, index, y, index, index), generate

    return weighted_sums


def make_tile(most: int, vectors: int) -> Any:
    """``tile(rows, x, x_at, x_stride, w, w_at, length, ahead, pace, scale, scale_at, y, y_at, y_stride, add)`` for rows ×
    (vectors · 16) outputs, at most ``most`` rows.

    ``w[w_at :]`` is a panel, [length, vectors · 16]: the weights of neighbouring outputs side by side. Sets ``y[y_at + r·y_stride +
    o]`` to the sum over k = 0, 1, ... length - 1, in this order, of ``x[x_at + r·x_stride + k] · w[w_at + k·vectors·16 + o]``: one
    chain of fused multiply-adds for each result, whatever the tile; times ``scale[scale_at + o]``, and plus what ``y`` was if
    ``add``. A panel of int8 takes rows as ``integers.prepare_row`` leaves them, and ``integers.integer_sums`` of them. Meanwhile
    memory is asked for ``w[ahead : ahead + pace · length]``, where ``pace`` is 0 (for no more than a line) or ``make_pace(w)``.
    """

    @intrinsic  # type: ignore[untyped-decorator]
    def tile(
        typing: Any,
        rows: Any,
        x: Any,
        x_at: Any,
        x_stride: Any,
        w: Any,
        w_at: Any,
        length: Any,
        ahead: Any,
        pace: Any,
        scale: Any,
        scale_at: Any,
        y: Any,
        y_at: Any,
        y_stride: Any,
        add: Any,
    ) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            x_data, w_data, scale_data, y_data = (array_data(context, builder, signature.args[i], args[i]) for i in (1, 4, 9, 11))

            def ask(k: Any) -> None:
                first = builder.gep(w_data, [builder.add(args[7], builder.mul(k, args[8]))])
                for line in range(_ASKED):
                    prefetch_line(builder, first, CACHE_LINE * line)

            offsets = [ir.Constant(INDEX, LANES * i) for i in range(vectors)]

            def multiply(rows: int) -> None:
                x_rows = row_offsets(builder, args[2], args[3], rows)
                if w.dtype == types.int8:
                    sums = integer_sums(builder, x, x_data, x_rows, w_data, args[5], args[6], vectors, ask)
                else:
                    sums = _float_sums(builder, x, x_data, x_rows, w, w_data, args[5], args[6], vectors, ask)
                scales = [load_vector(builder, scale, scale_data, builder.add(args[10], offset)) for offset in offsets]
                results = [builder.fmul(value, scales[i % vectors]) for i, value in enumerate(sums)]
                places = [builder.add(at, offset) for at in row_offsets(builder, args[12], args[13], rows) for offset in offsets]
                with builder.if_else(builder.trunc(args[14], ir.IntType(1))) as (adding, setting):
                    with adding:
                        for value, place in zip(results, places, strict=True):
                            store_vector(builder, builder.fadd(load_vector(builder, y, y_data, place), value), y_data, place)
                    with setting:
                        for value, place in zip(results, places, strict=True):
                            store_vector(builder, value, y_data, place)

            for_count(builder, args[0], most, multiply)
            return context.get_dummy_value()

        index = types.intp
        return types.void(
            index, x, index, index, w, index, index, index, index, scale, index, y, index, index, types.boolean
        ), generate

    return tile


@intrinsic  # type: ignore[untyped-decorator]
def make_pace(typing: Any, w: Any) -> Any:
    """Elements of ``w`` that a tile asks for with each input: 2 cache lines with 4 of them, or with 8 that int8 takes in pairs."""
    inputs = 2 * _UNROLLED if w.dtype == types.int8 else _UNROLLED
    pace = ir.Constant(INDEX, _ASKED * CACHE_LINE * 8 // w.dtype.bitwidth // inputs)
    return types.intp(w), lambda context, builder, signature, args: pace


def _float_sums(
    builder: Any, x: Any, x_data: Any, x_rows: list[Any], w: Any, w_data: Any, w_at: Any, length: Any, vectors: int, ask: Any
) -> list[Any]:
    """Sums of products of float32 rows with a panel: for each row, ``vectors`` vectors. ``ask(k)`` is called with the first of 4
    inputs."""
    width = vectors * LANES

    def step(k: Any, sums: list[Any]) -> list[Any]:
        at = builder.add(w_at, builder.mul(k, ir.Constant(INDEX, width)))
        ws = [load_vector(builder, w, w_data, builder.add(at, ir.Constant(INDEX, LANES * i))) for i in range(vectors)]
        added = []
        for i, row in enumerate(x_rows):  # each input right before its use, so that one register is enough for all of them
            value = splat(builder, load(builder, x, x_data, builder.add(row, k)))
            added += [fma_of(builder, value, ws[j], sums[i * vectors + j]) for j in range(vectors)]
        return added

    def steps(k: Any, sums: list[Any]) -> list[Any]:
        ask(k)
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
        targets = row_offsets(builder, args[5], args[6], LANES)
        for j in range(0, LANES, _BLOCK):
            for i in range(0, LANES, _BLOCK):
                at = builder.add(args[3], ir.Constant(INDEX, i))
                rows = [load_vector(builder, x, x_data, builder.add(start, at), _BLOCK) for start in starts[j : j + _BLOCK]]
                for distance, low, high in _TURNS:
                    for first in (row for row in range(_BLOCK) if not row & distance):
                        pair = rows[first], rows[first + distance]
                        rows[first], rows[first + distance] = (
                            builder.shuffle_vector(*pair, ir.Constant(ir.VectorType(INT32, _BLOCK), order)) for order in (low, high)
                        )
                for row, column in enumerate(_COLUMNS):
                    store_vector(builder, rows[row], y_data, builder.add(targets[i + column], ir.Constant(INDEX, j)))
        return context.get_dummy_value()

    return types.void(x, offsets, types.intp, types.intp, y, types.intp, types.intp), generate


_BLOCK = 8
#: Two rows each, so far apart, become two: single numbers, then pairs, within 128 bits, then all 128 bits: one instruction each,
#: with AVX as well. (Numbers that cross 128 bits took three, and 16 rows of 16 more registers than there are.)
_TURNS = (
    (1, [0, 8, 1, 9, 4, 12, 5, 13], [2, 10, 3, 11, 6, 14, 7, 15]),
    (2, [0, 1, 8, 9, 4, 5, 12, 13], [2, 3, 10, 11, 6, 7, 14, 15]),
    (4, [0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7, 12, 13, 14, 15]),
)
_COLUMNS = (0, 2, 1, 3, 4, 6, 5, 7)  #: that the rows are then
