"""LLVM's language, as far as kernels speak it directly: so that their order of operations is ours and not the vectoriser's.

Arithmetic is float32; what is read may be stored narrower, and numba has no types for that, so an array's integer type says what
its bits are: **uint16 is bfloat16, int16 is float16, int8 is an integer**. Widening any of them is exact.
"""

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import binding, ir
from numba import types
from numba.core import cgutils

LANES = 16
CACHE_LINE = 64  #: bytes
#: 32 registers of 16 lanes; elsewhere there are as many lanes in twice the registers or more, and of these no more than 16.
WIDE = binding.get_host_cpu_features().get("avx512f", False)
FLOAT = ir.FloatType()
VECTOR = ir.VectorType(FLOAT, LANES)
INDEX = ir.IntType(64)
INT32 = ir.IntType(32)
HALF_BITS = ir.Constant(INT32, 16)


def fma_of(builder: Any, a: Any, b: Any, c: Any) -> Any:
    suffix = f"v{LANES}f32" if a.type == VECTOR else "f32"
    signature = ir.FunctionType(a.type, [a.type] * 3)
    return builder.call(cgutils.get_or_insert_function(builder.module, signature, f"llvm.fma.{suffix}"), [a, b, c])


def widen(builder: Any, array_type: Any, stored: Any) -> Any:
    """What was loaded from an array of ``array_type``, one element or a vector, as float32."""
    if array_type.dtype == types.float32:
        return stored

    lanes = stored.type.count if isinstance(stored.type, ir.VectorType) else 0

    def like(element: Any) -> Any:
        return ir.VectorType(element, lanes) if lanes else element

    if array_type.dtype == types.uint16:
        sixteen = ir.Constant(like(INT32), [16] * lanes) if lanes else HALF_BITS
        return builder.bitcast(builder.shl(builder.zext(stored, like(INT32)), sixteen), like(FLOAT))
    if array_type.dtype == types.int16:
        return builder.fpext(builder.bitcast(stored, like(ir.HalfType())), like(FLOAT))
    if array_type.dtype == types.int8:
        return builder.sitofp(builder.sext(stored, like(INT32)), like(FLOAT))
    raise TypeError(f"kernels read float32, uint16 (bfloat16), int16 (float16) and int8, not {array_type.dtype}")


def load_vector(builder: Any, array_type: Any, data: Any, offset: Any, lanes: int = LANES) -> Any:
    vector = ir.VectorType(data.type.pointee, lanes)
    pointer = builder.bitcast(builder.gep(data, [offset]), vector.as_pointer())
    return widen(builder, array_type, builder.load(pointer, align=array_type.dtype.bitwidth // 8, typ=vector))


def store_vector(builder: Any, value: Any, data: Any, offset: Any) -> None:
    builder.store(value, builder.bitcast(builder.gep(data, [offset]), value.type.as_pointer()), align=4)


def store(builder: Any, value: Any, data: Any, offset: Any) -> None:
    builder.store(value, builder.gep(data, [offset]), align=4)


def load(builder: Any, array_type: Any, data: Any, offset: Any) -> Any:
    return widen(builder, array_type, builder.load(builder.gep(data, [offset]), align=array_type.dtype.bitwidth // 8))


def splat(builder: Any, value: Any) -> Any:
    single = builder.insert_element(ir.Constant(VECTOR, ir.Undefined), value, ir.Constant(ir.IntType(32), 0))
    return builder.shuffle_vector(
        single, ir.Constant(VECTOR, ir.Undefined), ir.Constant(ir.VectorType(ir.IntType(32), LANES), [0] * LANES)
    )


def sum_lanes(builder: Any, vector: Any) -> Any:
    return fold_lanes(builder, vector, lambda builder, a, b: builder.fadd(a, b))


def fold_lanes(builder: Any, vector: Any, combine: Callable[[Any, Any, Any], Any]) -> Any:
    """Lane i with lane i + half, then again with half as many: the one tree that every reduction here ends with."""
    width = LANES
    while width > 1:
        width //= 2
        index = ir.VectorType(ir.IntType(32), width)
        low = builder.shuffle_vector(vector, vector, ir.Constant(index, list(range(width))))
        high = builder.shuffle_vector(vector, vector, ir.Constant(index, list(range(width, 2 * width))))
        vector = combine(builder, low, high)
    return builder.extract_element(vector, ir.Constant(ir.IntType(32), 0))


def loop(
    builder: Any, start: Any, stop: Any, step: int, carried: Sequence[Any], body: Callable[[Any, list[Any]], list[Any]]
) -> list[Any]:
    """``for k in range(start, stop, step): carried = body(k, carried)``; returns what is carried at the end."""
    before = builder.block
    head, inside, after = (builder.append_basic_block(name) for name in ("head", "inside", "after"))
    builder.branch(head)
    builder.position_at_end(head)
    k = builder.phi(INDEX)
    values = [builder.phi(value.type) for value in carried]
    builder.cbranch(builder.icmp_signed("<", k, stop), inside, after)
    builder.position_at_end(inside)
    results = body(k, list(values))
    following = builder.add(k, ir.Constant(INDEX, step))
    for phi, first, again in zip([k, *values], [start, *carried], [following, *results], strict=True):
        phi.add_incoming(first, before)
        phi.add_incoming(again, builder.block)
    builder.branch(head)
    builder.position_at_end(after)
    return list(values)


def for_count(builder: Any, count: Any, most: int, body: Callable[[int], None]) -> None:
    """``body(n)`` for the n that ``count`` is, from 1 to ``most``: code for each of them, and a jump there. Nothing for others."""
    after = builder.append_basic_block("after")
    switch = builder.switch(count, after)
    for n in range(1, most + 1):
        block = builder.append_basic_block(f"count_{n}")
        switch.add_case(ir.Constant(count.type, n), block)
        builder.position_at_end(block)
        body(n)
        builder.branch(after)
    builder.position_at_end(after)


def prefetch_line(builder: Any, pointer: Any, offset: int) -> None:
    """Ask for the cache line ``offset`` bytes behind ``pointer``, which need not exist, into the second cache."""
    byte = ir.IntType(8).as_pointer()
    place = builder.gep(builder.bitcast(pointer, byte), [ir.Constant(INDEX, offset)])
    function = ir.FunctionType(ir.VoidType(), [byte, INT32, INT32, INT32])
    read, second, data = ir.Constant(INT32, 0), ir.Constant(INT32, 2), ir.Constant(INT32, 1)
    builder.call(cgutils.get_or_insert_function(builder.module, function, "llvm.prefetch.p0"), [place, read, second, data])


def array_data(context: Any, builder: Any, array_type: Any, value: Any) -> Any:
    return context.make_array(array_type)(context, builder, value).data


def narrow(builder: Any, array_type: Any, value: Any) -> Any:
    if array_type.dtype == types.float32:
        return value
    if array_type.dtype == types.int16:
        return builder.bitcast(builder.fptrunc(value, ir.HalfType()), ir.IntType(16))
    if array_type.dtype == types.uint16:
        bits = builder.bitcast(value, INT32)
        odd = builder.and_(builder.lshr(bits, HALF_BITS), ir.Constant(INT32, 1))
        rounded = builder.lshr(builder.add(bits, builder.add(odd, ir.Constant(INT32, 0x7FFF))), HALF_BITS)
        # Rounding a NaN's bits could carry into infinity: keep its upper half, made quiet.
        quiet = builder.or_(builder.lshr(bits, HALF_BITS), ir.Constant(INT32, 0x40))
        return builder.trunc(builder.select(builder.fcmp_unordered("uno", value, value), quiet, rounded), ir.IntType(16))
    raise TypeError(f"kernels write float32, uint16 (bfloat16) and int16 (float16), not {array_type.dtype}")
