"""Where the slots of a sequence lie in the pool, and how their keys and values are read from there."""

from typing import Any

import numpy.typing as npt

from engine.kernels.elementwise import SOFTENED, load_element, prefetch, touch
from engine.kernels.jit import F32, I32, I64, inline
from engine.kernels.llvm import LANES
from engine.kernels.panels import WIDTH
from engine.kernels.vector import turn_block

SLOTS = SOFTENED  #: positions that are read together, as panels

Pool = npt.NDArray[Any]
"""[num_pages, num_layers, 2, page_size, num_kv_heads, head_dim] of float32, uint16 (bfloat16) or int16 (float16)."""


@inline
def slot_offset(shape: tuple[int, int, int, int, int, int], layer: int, page_table: I32, position: int) -> int:
    """Where a position's keys begin in the flat pool; its values are ``page_size * num_kv_heads * head_dim`` further on."""
    _, num_layers, _, page_size, num_kv_heads, head_dim = shape
    page, slot = page_table[position // page_size], position % page_size
    offset: int = ((page * num_layers + layer) * 2 * page_size + slot) * num_kv_heads * head_dim
    return offset


@inline
def find_slots(
    shape: tuple[int, int, int, int, int, int],
    layer: int,
    page_table: I32,
    first_head: int,
    position: int,
    length: int,
    offsets: I64,
    at: int,
) -> None:
    """``offsets[at : at + 64]``: where the keys of 64 positions from ``position`` on lie; the last one's for those behind it."""
    page_size, stride = shape[3], shape[4] * shape[5]
    slot, known = 0, min(SLOTS, length - position)
    while slot < known:
        count = min(known - slot, page_size - (position + slot) % page_size)
        first = slot_offset(shape, layer, page_table, position + slot) + first_head * shape[5]
        for i in range(count):
            offsets[at + slot + i] = first + i * stride
        slot += count
    for slot in range(max(0, known), SLOTS if known > 0 else 0):
        offsets[at + slot] = offsets[at + known - 1]


@inline
def touch_slots(pool: Pool, offsets: I64, slots: int, width: int, to_values: int) -> None:
    """Bring the first positions, which nobody could ask for, in the order of memory."""
    for half in range(2):
        for slot in range(slots):
            for i in range(0, width, 64 // pool.itemsize):
                touch(pool, offsets[slot] + half * to_values + i)


@inline
def ask(pool: Pool, offsets: I64, ahead: tuple[int, int, int, int, int], asked: int) -> int:
    """Prefetch keys or values of a few of the positions to come, of which ``asked`` were asked for; how many now are. ``ahead``:
    where in ``offsets`` they begin, their width, from keys to values, how many at a time, how many in all.

    So the order in which they are read then does not matter: keys first and values afterwards, they came from memory at less than
    half the speed. A few at a time: a core has some twenty requests to memory open and waits with the next."""
    at, width, to_values, more, every = ahead
    upto = min(asked + more, every)
    for number in range(asked, upto):
        place = offsets[at + number // 2] + number % 2 * to_values
        for i in range(0, width, 64 // pool.itemsize):
            prefetch(pool, place + i)
    return max(asked, upto)


@inline
def turn_keys(
    pool: Pool,
    offsets: I64,
    first: int,
    head_at: int,
    dim: int,
    panels: F32,
    at: int,
    ahead: tuple[int, int, int, int, int],
    asked: int,
) -> int:
    """A panel of the keys of ``WIDTH`` positions, [dim, WIDTH], to ``panels[at:]``; asks for those to come meanwhile."""
    d = 0
    while d + LANES <= dim:
        for half in range(0, WIDTH, LANES):
            turn_block(pool, offsets, first + half, head_at + d, panels, at + d * WIDTH + half, WIDTH)
            asked = ask(pool, offsets, ahead, asked)
        d += LANES
    while d < dim:
        for slot in range(WIDTH):
            panels[at + d * WIDTH + slot] = load_element(pool, offsets[first + slot] + head_at + d)
        d += 1
    return asked
