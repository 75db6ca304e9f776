"""The machine's own speed: threads. Each request measures anew how fast memory is read and fp32 multiply-adds are done."""

import sys
import time
from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from llvmlite import binding, ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from benchmarks.peers.protocol import Message, serve

BUFFER = 1 << 30  #: bytes
PASSES = 5  #: the fastest counts: what the machine can do
CHAINS, TURNS = 12, 20_000_000  #: independent multiply-adds that a core has at hand, and how often
LANES = 16 if binding.get_host_cpu_features().get("avx512f", False) else 8


@intrinsic  # type: ignore[untyped-decorator]
def _multiply_add(typing: Any, turns: Any, x: Any, y: Any) -> Any:
    """``turns`` times ``CHAINS`` vectors ``v = v * x + y``, all in registers; the sum of their first lanes."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        vector = ir.VectorType(ir.FloatType(), LANES)
        index = ir.IntType(64)
        turns, *scalars = arguments
        single = ir.Constant(vector, ir.Undefined)
        zeros = ir.Constant(ir.VectorType(ir.IntType(32), LANES), [0] * LANES)
        first = ir.Constant(ir.IntType(32), 0)
        x, y = (builder.shuffle_vector(builder.insert_element(single, s, first), single, zeros) for s in scalars)
        fma = cgutils.get_or_insert_function(builder.module, ir.FunctionType(vector, [vector] * 3), f"llvm.fma.v{LANES}f32")
        before, loop, after = builder.block, builder.append_basic_block("loop"), builder.append_basic_block("after")
        builder.branch(loop)
        builder.position_at_end(loop)
        turn, *chains = [builder.phi(kind) for kind in (index, *[vector] * CHAINS)]
        following = [builder.add(turn, index(1)), *[builder.call(fma, [chain, x, y]) for chain in chains]]
        for number, (phi, value) in enumerate(zip([turn, *chains], following, strict=True)):
            phi.add_incoming(ir.Constant(phi.type, 0 if number == 0 else [float(number)] * LANES), before)
            phi.add_incoming(value, loop)
        builder.cbranch(builder.icmp_signed("<", following[0], turns), loop, after)
        builder.position_at_end(after)
        total = following[1]
        for chain in following[2:]:
            total = builder.fadd(total, chain)
        return builder.extract_element(total, first)

    return types.float32(types.int64, types.float32, types.float32), generate


@numba.njit(parallel=True)  # type: ignore[untyped-decorator]
def _multiply_add_all(threads: int, turns: int, x: np.float32, y: np.float32) -> float:
    sums = np.zeros(threads, np.float32)
    for thread in numba.prange(threads):
        sums[thread] = _multiply_add(turns, x, y)
    return float(sums.sum())


@numba.njit(parallel=True, fastmath=True)  # type: ignore[untyped-decorator]
def _read_all(data: np.ndarray[Any, np.dtype[np.int64]], threads: int) -> int:
    sums = np.zeros(threads, np.int64)
    for thread in numba.prange(threads):
        total = 0
        for value in data[len(data) * thread // threads : len(data) * (thread + 1) // threads]:
            total += value
        sums[thread] = total
    return int(sums.sum())


def _fastest(work: Callable[[], object]) -> float:
    """Seconds of the fastest pass."""
    seconds = []
    for _ in range(PASSES):
        began = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - began)
    return min(seconds)


def load() -> tuple[Callable[[Message], Message], Message]:
    threads = int(sys.argv[1])
    numba.set_num_threads(threads)
    data = np.ones(BUFFER // 8, np.int64)
    x, y = np.float32(0.5), np.float32(1)

    def answer(request: Message) -> Message:
        cpu = time.process_time()
        reading = _fastest(lambda: _read_all(data, threads))
        adding = _fastest(lambda: _multiply_add_all(threads, TURNS, x, y))
        flops = 2 * LANES * CHAINS * TURNS * threads
        return {
            "bytes_per_s": data.nbytes / reading,
            "flops_per_s": flops / adding,
            "cpu_seconds": time.process_time() - cpu,
        }

    answer({})  # compiles
    return answer, {"version": f"numba {numba.__version__}"}


if __name__ == "__main__":
    serve(load)
