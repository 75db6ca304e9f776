"""Products with int8 weights, in integers: exact within a group of inputs, and twice the multiply-adds of float32 per instruction.

A row is *prepared* in place: each ``GROUP`` of inputs becomes 16-bit integers and the scale that they share, so what is lost of an
input is at most 2⁻¹⁶ of the largest of its group, far below what int8 lost of the weights. Sums of a group cannot overflow
(128 · 127 · 32767 < 2³¹) and have the same bits in any order and on any processor; groups are added up in float32, in order.
"""

from typing import Any

from llvmlite import binding, ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from engine.kernels.jit import inline
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
    splat,
)

GROUP = 128  #: inputs that share a scale
_BLOCK = GROUP // 2 + 1  #: 32-bit words of a group: its scale, then a word for two inputs
_LEVELS = 32767.0
# Below this the scale's inverse might be infinite. Such inputs count as zero.
_SMALLEST = 1e-30
_UNROLLED = 4  #: steps of the inner loop, two inputs each
_INTEGERS = ir.VectorType(INT32, LANES)
_PAIRS = ir.VectorType(ir.IntType(16), 2 * LANES)
_FEATURES = binding.get_host_cpu_features()


@intrinsic  # type: ignore[untyped-decorator]
def reads_integers(typing: Any, panels: Any) -> Any:
    """Whether products with these panels take prepared rows; known when a kernel is compiled."""
    answer = ir.Constant(ir.IntType(1), int(panels.dtype == types.int8))
    return types.boolean(panels), lambda context, builder, signature, args: answer


@inline
def place_of(panels: Any, k: int, o: int, width: int) -> int:
    """Where in a panel input ``k`` of output ``o`` lies. int8: [in / 2, width, 2], so that the two of a pair are neighbours."""
    if reads_integers(panels):
        return (k // 2 * width + o) * 2 + k % 2
    return k * width + o


@intrinsic  # type: ignore[untyped-decorator]
def prepare_row(typing: Any, x: Any, at: Any, length: Any) -> Any:
    """``x[at : at + length]``, float32 and of even length, becomes integers and scales in place.

    A group with a NaN or an infinity in it gets such a scale, so that the results are none either.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data, at, length = array_data(context, builder, x, args[0]), args[1], args[2]
        number = ir.IntType(16)

        def whole_group(g: Any, carried: list[Any]) -> list[Any]:
            done = builder.mul(g, ir.Constant(INDEX, GROUP))
            source, count = builder.add(at, done), _at_most(builder, builder.sub(length, done), GROUP)
            target = builder.add(at, builder.mul(g, ir.Constant(INDEX, _BLOCK)))
            words = builder.bitcast(builder.gep(data, [builder.add(target, ir.Constant(INDEX, 1))]), number.as_pointer())
            scale, inverse = _scale_of(builder, x, data, source, count)

            # Words never reach what is still to be read: the block of a group begins no later than the group, and is shorter.
            def vectors(k: Any, carried: list[Any]) -> list[Any]:
                integers = _rounded(builder, load_vector(builder, x, data, builder.add(source, k)), splat(builder, inverse))
                place = builder.bitcast(builder.gep(words, [k]), ir.VectorType(number, LANES).as_pointer())
                builder.store(builder.trunc(integers, ir.VectorType(number, LANES)), place, align=2)
                return []

            def pairs(k: Any, carried: list[Any]) -> list[Any]:
                both = [builder.add(k, ir.Constant(INDEX, i)) for i in (0, 1)]
                integers = [_rounded(builder, load(builder, x, data, builder.add(source, one)), inverse) for one in both]
                for one, integer in zip(both, integers, strict=True):
                    builder.store(builder.trunc(integer, number), builder.gep(words, [one]), align=2)
                return []

            whole = builder.and_(count, ir.Constant(INDEX, -LANES))
            loop(builder, ir.Constant(INDEX, 0), whole, LANES, [], vectors)
            loop(builder, whole, count, 2, [], pairs)
            builder.store(scale, builder.gep(data, [target]), align=4)
            return []

        loop(builder, ir.Constant(INDEX, 0), _groups(builder, length), 1, [], whole_group)
        return context.get_dummy_value()

    return types.void(x, types.intp, types.intp), generate


def _scale_of(builder: Any, x: Any, data: Any, source: Any, count: Any) -> tuple[Any, Any]:
    """What one step of the integers of a group stands for, and one divided by it."""

    def larger(builder: Any, a: Any, b: Any) -> Any:
        return builder.select(builder.icmp_unsigned(">", a, b), a, b)

    def magnitude(value: Any, like: Any) -> Any:
        # Without its sign, a float's bits have the order of the numbers; infinity and NaN are the largest.
        mask = ir.Constant(like, [0x7FFFFFFF] * LANES) if like == _INTEGERS else ir.Constant(like, 0x7FFFFFFF)
        return builder.and_(builder.bitcast(value, like), mask)

    def block(k: Any, carried: list[Any]) -> list[Any]:
        return [larger(builder, carried[0], magnitude(load_vector(builder, x, data, builder.add(source, k)), _INTEGERS))]

    def tail(k: Any, carried: list[Any]) -> list[Any]:
        return [larger(builder, carried[0], magnitude(load(builder, x, data, builder.add(source, k)), INT32))]

    whole = builder.and_(count, ir.Constant(INDEX, -LANES))
    (lanes,) = loop(builder, ir.Constant(INDEX, 0), whole, LANES, [ir.Constant(_INTEGERS, [0] * LANES)], block)
    (bits,) = loop(builder, whole, count, 1, [fold_lanes(builder, lanes, larger)], tail)
    largest, levels = builder.bitcast(bits, FLOAT), ir.Constant(FLOAT, _LEVELS)
    usable = builder.fcmp_ordered(">", largest, ir.Constant(FLOAT, _SMALLEST))
    return builder.fdiv(largest, levels), builder.select(usable, builder.fdiv(levels, largest), ir.Constant(FLOAT, 0.0))


def _rounded(builder: Any, value: Any, factor: Any) -> Any:
    """``value · factor`` rounded to the nearest, ties to even, in the low 16 bits of an int32: after 1.5 · 2²³ is added, they stand
    at the end of the float."""
    is_vector = isinstance(value.type, ir.VectorType)
    magic = ir.Constant(VECTOR, [12582912.0] * LANES) if is_vector else ir.Constant(FLOAT, 12582912.0)
    return builder.bitcast(fma_of(builder, value, factor, magic), _INTEGERS if is_vector else INT32)


def integer_sums(
    builder: Any, x: Any, x_data: Any, x_rows: list[Any], w_data: Any, w_at: Any, length: Any, vectors: int, ask: Any
) -> list[Any]:
    """Sums of products of prepared rows with a panel of int8: for each row, ``vectors`` vectors of float32. ``ask(k)`` is called
    with the first of 8 inputs."""
    rows, width = len(x_rows), vectors * LANES
    words = builder.bitcast(x_data, INT32.as_pointer())

    def group(g: Any, sums: list[Any]) -> list[Any]:
        done = builder.mul(g, ir.Constant(INDEX, GROUP))
        pairs = builder.lshr(_at_most(builder, builder.sub(length, done), GROUP), ir.Constant(INDEX, 1))
        first = builder.mul(g, ir.Constant(INDEX, _BLOCK))
        blocks = [builder.add(row, first) for row in x_rows]
        inputs = [builder.add(block, ir.Constant(INDEX, 1)) for block in blocks]
        weights = builder.add(w_at, builder.mul(done, ir.Constant(INDEX, width)))

        def step(p: Any, totals: list[Any]) -> list[Any]:
            at = builder.add(weights, builder.mul(p, ir.Constant(INDEX, 2 * width)))
            ws = [_load_weights(builder, w_data, builder.add(at, ir.Constant(INDEX, 2 * LANES * i))) for i in range(vectors)]
            added = []
            for i, row in enumerate(inputs):
                pair = _load_inputs(builder, words, builder.add(row, p))
                added += [_add_pair_products(builder, totals[i * vectors + j], pair, ws[j]) for j in range(vectors)]
            return added

        def steps(p: Any, totals: list[Any]) -> list[Any]:
            ask(builder.add(done, builder.shl(p, ir.Constant(INDEX, 1))))
            for i in range(_UNROLLED):
                totals = step(builder.add(p, ir.Constant(INDEX, i)), totals)
            return totals

        zeros = [ir.Constant(_INTEGERS, [0] * LANES)] * (rows * vectors)
        whole = builder.and_(pairs, ir.Constant(INDEX, -_UNROLLED))
        totals = loop(builder, ir.Constant(INDEX, 0), whole, _UNROLLED, zeros, steps)
        totals = loop(builder, whole, pairs, 1, totals, step)
        scales = [splat(builder, load(builder, x, x_data, block)) for block in blocks]
        return [fma_of(builder, builder.sitofp(total, VECTOR), scales[i // vectors], sums[i]) for i, total in enumerate(totals)]

    zeros = [ir.Constant(VECTOR, [0.0] * LANES)] * (rows * vectors)
    return loop(builder, ir.Constant(INDEX, 0), _groups(builder, length), 1, zeros, group)


def _load_weights(builder: Any, data: Any, offset: Any) -> Any:
    """Of 16 outputs two inputs each, as 16-bit integers."""
    bytes_ = ir.VectorType(ir.IntType(8), 2 * LANES)
    return builder.sext(builder.load(builder.bitcast(builder.gep(data, [offset]), bytes_.as_pointer()), align=1), _PAIRS)


def _load_inputs(builder: Any, words: Any, offset: Any) -> Any:
    """Two inputs of a row, as 16-bit integers, for each of 16 outputs."""
    word = builder.load(builder.gep(words, [offset]), align=4)
    single = builder.insert_element(ir.Constant(_INTEGERS, ir.Undefined), word, ir.Constant(INT32, 0))
    everywhere = builder.shuffle_vector(single, ir.Constant(_INTEGERS, ir.Undefined), ir.Constant(_INTEGERS, [0] * LANES))
    return builder.bitcast(everywhere, _PAIRS)


def _add_pair_products(builder: Any, total: Any, xs: Any, ws: Any) -> Any:
    """``total[i] + xs[2i] · ws[2i] + xs[2i + 1] · ws[2i + 1]``, in int32."""
    if _FEATURES.get("avx512bw", False):  # LLVM makes one instruction of the two where the processor has it (VNNI)
        return builder.add(total, _pair_products(builder, "avx512.pmaddw.d.512", ws, xs, 0, LANES))
    if _FEATURES.get("avx2", False):
        low, high = (_pair_products(builder, "avx2.pmadd.wd", ws, xs, first, LANES // 2) for first in (0, LANES // 2))
        return builder.add(total, builder.shuffle_vector(low, high, ir.Constant(_INTEGERS, list(range(LANES)))))
    for first in (0, 1):
        index = ir.Constant(_INTEGERS, list(range(first, 2 * LANES, 2)))
        x, w = (builder.sext(builder.shuffle_vector(pairs, pairs, index), _INTEGERS) for pairs in (xs, ws))
        total = builder.add(total, builder.mul(x, w))
    return total


def _pair_products(builder: Any, name: str, ws: Any, xs: Any, first: int, count: int) -> Any:
    """x86's instruction for ``count`` such sums from the ``first`` on."""
    pairs, numbers = ir.VectorType(ir.IntType(16), 2 * count), ir.VectorType(INT32, count)
    multiply = cgutils.get_or_insert_function(builder.module, ir.FunctionType(numbers, [pairs, pairs]), f"llvm.x86.{name}")
    part = ir.Constant(ir.VectorType(INT32, 2 * count), list(range(2 * first, 2 * (first + count))))
    return builder.call(multiply, [builder.shuffle_vector(each, each, part) for each in (ws, xs)])


def _groups(builder: Any, length: Any) -> Any:
    return builder.udiv(builder.add(length, ir.Constant(INDEX, GROUP - 1)), ir.Constant(INDEX, GROUP))


def _at_most(builder: Any, value: Any, bound: int) -> Any:
    limit = ir.Constant(INDEX, bound)
    return builder.select(builder.icmp_signed("<", value, limit), value, limit)
