"""How the threads of one call share its work.

A call is a row of *phases*, and a phase is a number of items. Threads take items as they come free, and go on to the next phase
when every item of this one is done, whoever did it: a thread that the system put to sleep between two items holds nobody up,
which one that has to show up at a barrier does. There is one parallel region for a whole call.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from engine.kernels.jit import I64, inline
from engine.kernels.llvm import array_data

CELLS = 16
"""int64 that a phase needs, all zero at first: the next item and the number of items done, each in a cache line of its own."""
ROWS_EACH = 4  #: rows of an item, where a phase goes by rows
_DONE = 8
_SPINS = 4000  #: rounds of waiting before the core is offered to others
_INDEX = ir.IntType(64)


@inline
def take(cells: I64, phase: int) -> int:
    """An item that no other thread gets; too large when none is left."""
    item: int = _add(cells, phase * CELLS)
    return item


@inline
def done(cells: I64, phase: int) -> None:
    """An item is done, and what was written for it is seen by whoever waited for the phase."""
    _add(cells, phase * CELLS + _DONE)


@inline
def wait(cells: I64, phase: int, items: int) -> None:
    """Until all ``items`` of the phase are done."""
    spins = 0
    while _read(cells, phase * CELLS + _DONE) < items:
        spins += 1
        if spins > _SPINS:
            _yield_core()
        else:
            _pause()


@intrinsic  # type: ignore[untyped-decorator]
def _add(typing: Any, cells: Any, at: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        place = builder.gep(array_data(context, builder, cells, args[0]), [args[1]])
        return builder.atomic_rmw("add", place, ir.Constant(_INDEX, 1), "acq_rel")

    return types.intp(cells, types.intp), generate


@intrinsic  # type: ignore[untyped-decorator]
def _read(typing: Any, cells: Any, at: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        place = builder.gep(array_data(context, builder, cells, args[0]), [args[1]])
        return builder.load_atomic(place, "acquire", 8)

    return types.intp(cells, types.intp), generate


@intrinsic  # type: ignore[untyped-decorator]
def _yield_core(typing: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        function = ir.FunctionType(ir.IntType(32), [])
        builder.call(cgutils.get_or_insert_function(builder.module, function, "sched_yield"), [])
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic  # type: ignore[untyped-decorator]
def _pause(typing: Any) -> Any:
    """Tell the core that this is a loop that waits, where it has a word for it."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if "x86_64" in builder.module.triple:
            builder.call(
                cgutils.get_or_insert_function(builder.module, ir.FunctionType(ir.VoidType(), []), "llvm.x86.sse2.pause"), []
            )
        return context.get_dummy_value()

    return types.void(), generate
