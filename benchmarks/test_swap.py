"""How fast pages move between the pools, against plain copies of the same bytes that check nothing and keep no books.

Ours is ``ThreadSwap`` through its protocol, from ``submit`` to ``completed``, the hand-over between threads included, with the
checksum of every page taken (out) or compared (in); ``checked`` shows how much of the distance is the checksum. All of it fits in
memory and was touched before: files are read from and written to the page cache, and neither side waits for the disk.
"""

import os
import random
from collections.abc import Callable
from contextlib import closing, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import xxhash
from pytest_benchmark.fixture import BenchmarkFixture

from benchmarks.harness import Side, in_turns, open_pool
from engine.geometry import PageGeometry
from engine.pools import DevicePool, HostPool, MemoryBacking, PageBacking, PageBytes
from engine.swap import Completed, Direction, PageMove, SwapEngine, ThreadSwap, Transfer

GOAL = 0.8  #: of a plain copy, at least
#: SmolLM2-135M's page, 737,280 bytes, and one of two layers, 49,152 bytes, where neighbours travel together.
GEOMETRIES = {"real": PageGeometry(30, 16, 3, 64, "float32"), "small": PageGeometry(2, 16, 3, 64, "float32")}
TRANSFER = 16  #: pages: a Sequence of 256 tokens
POOL_BYTES, QUICK_BYTES = 96 << 20, 24 << 20  #: three times the processor's cache; quick: so that it is one transfer at least
ROUNDS, QUICK_ROUNDS = 41, 3

#: Copies between a piece of the device pool and the bytes from an offset on in the other place.
PlainCopy = Callable[[PageBytes, int], object]


@dataclass(frozen=True, slots=True)
class Case:
    """Every page of a device pool, in transfers like those of one Sequence after another."""

    device: DevicePool
    transfers: tuple[Transfer, ...]

    def ours(self, swap: SwapEngine) -> Side[object]:
        return lambda: nullcontext(lambda: move(swap, self.transfers))

    def plain(self, copy: PlainCopy) -> Side[object]:
        """The same bytes in the largest pieces there are: a transfer at once where its pages lie in a row, else page by page."""
        pool = self.device.bytes.numpy()
        pieces: list[tuple[PageBytes, int]] = []
        for transfer in self.transfers:
            moves, first = transfer.moves, transfer.moves[0].device_page
            if all(each.host_page == each.device_page for each in moves):
                pieces.append((pool[first : first + len(moves)].reshape(-1), first * pool.shape[1]))
            else:
                pieces += self._pages(transfer)

        def run() -> None:
            for piece, offset in pieces:
                copy(piece, offset)

        return lambda: nullcontext(run)

    def checked(self, copy: PlainCopy) -> Side[object]:
        """Page by page, and a checksum of each: the least that any swap takes that notices a flipped bit."""
        pages = [page for transfer in self.transfers for page in self._pages(transfer)]

        def run() -> None:
            for page, offset in pages:
                copy(page, offset)
                xxhash.xxh3_64_intdigest(page.data)

        return lambda: nullcontext(run)

    def _pages(self, transfer: Transfer) -> list[tuple[PageBytes, int]]:
        pool = self.device.bytes.numpy()
        return [(pool[each.device_page], each.host_page * pool.shape[1]) for each in transfer.moves]


def make_device(page: str, *, quick: bool) -> DevicePool:
    pages = (QUICK_BYTES if quick else POOL_BYTES) // GEOMETRIES[page].page_bytes
    device = DevicePool(pages - pages % TRANSFER, GEOMETRIES[page])
    pool = device.bytes.numpy()
    pool[:] = np.random.default_rng(0).integers(0, 256, pool.shape, dtype=np.uint8)
    return device


def moves_of(device: DevicePool, order: str) -> list[PageMove]:
    host_pages = list(range(device.manager.total_pages))
    if order == "scattered":
        random.Random(0).shuffle(host_pages)
    return list(map(PageMove, range(len(host_pages)), host_pages))


def in_transfers(direction: Direction, moves: list[PageMove]) -> tuple[Transfer, ...]:
    return tuple(Transfer(direction, tuple(moves[at : at + TRANSFER])) for at in range(0, len(moves), TRANSFER))


def move(swap: SwapEngine, transfers: tuple[Transfer, ...]) -> list[Completed]:
    """From the first ``submit`` to the last completion, without any problem."""
    done: list[Completed] = []
    for transfer in transfers:
        swap.submit(transfer)
    while swap.in_flight:
        done += swap.completed(wait=60.0)
    assert not any(problem for each in done for problem in each.problems)
    return done


def make_case(device: DevicePool, swap: SwapEngine, direction: Direction, order: str) -> Case:
    """After everything went out and came in again, every bit as it was; the checksums of what went out are needed to come in."""
    before = device.bytes.clone()
    done = move(swap, in_transfers(Direction.OUT, moves_of(device, order)))
    moves = [
        replace(each, checksum=checksum)
        for transfer in done
        for each, checksum in zip(transfer.transfer.moves, transfer.checksums, strict=True)
    ]
    device.bytes.zero_()
    move(swap, in_transfers(Direction.IN, moves))
    assert device.bytes.equal(before)
    return Case(device, in_transfers(direction, moves))


def make_swap(device: DevicePool, backing: PageBacking) -> ThreadSwap:
    return ThreadSwap(device, HostPool(device.manager.total_pages, device.geometry, backing))


def memory_copy(direction: Direction, memory: PageBytes) -> PlainCopy:
    def out(piece: PageBytes, offset: int) -> None:
        np.copyto(memory[offset : offset + piece.size], piece)

    def back(piece: PageBytes, offset: int) -> None:
        np.copyto(piece, memory[offset : offset + piece.size])

    return out if direction is Direction.OUT else back


def file_copy(direction: Direction, fd: int) -> PlainCopy:
    def out(piece: PageBytes, offset: int) -> None:
        assert os.pwrite(fd, piece.data, offset) == piece.size

    def back(piece: PageBytes, offset: int) -> None:
        assert os.preadv(fd, [piece.data], offset) == piece.size

    return out if direction is Direction.OUT else back


def plain_file(device: DevicePool, path: Path) -> int:
    """The same bytes in a file without header, checksums or lock."""
    path.write_bytes(device.bytes.numpy().data)
    return os.open(path, os.O_RDWR)


@pytest.mark.parametrize("order", ["contiguous", "scattered"])
@pytest.mark.parametrize("page", GEOMETRIES)
@pytest.mark.parametrize("direction", list(Direction), ids=str)
def test_memory(benchmark: BenchmarkFixture, quick: bool, direction: Direction, page: str, order: str) -> None:
    device = make_device(page, quick=quick)
    memory = MemoryBacking(device.manager.total_pages, device.geometry.page_bytes)
    with closing(make_swap(device, memory)) as swap:
        case = make_case(device, swap, direction, order)
        copy = memory_copy(direction, memory.pages.reshape(-1))
        others = {"plain": case.plain(copy), "checked": case.checked(copy)}
        in_turns(benchmark, case.ours(swap), others, QUICK_ROUNDS if quick else ROUNDS)
    benchmark.extra_info |= {"goal": GOAL, "bytes": device.bytes.numel()}


@pytest.mark.parametrize("order", ["contiguous", "scattered"])
@pytest.mark.parametrize("page", GEOMETRIES)
@pytest.mark.parametrize("direction", list(Direction), ids=str)
def test_file(benchmark: BenchmarkFixture, quick: bool, disk: Path, direction: Direction, page: str, order: str) -> None:
    """Against ``pwrite`` and ``preadv``, and against the mapping of the same file."""
    device = make_device(page, quick=quick)
    file = plain_file(device, disk / "plain")
    with open_pool(disk / "pool", device, device.manager.total_pages) as pool, closing(make_swap(device, pool)) as swap:
        case = make_case(device, swap, direction, order)
        mapping = np.memmap(disk / "plain", dtype=np.uint8, mode="r+")
        others = {
            "plain": case.plain(file_copy(direction, file)),
            "checked": case.checked(file_copy(direction, file)),
            "mapping": case.plain(memory_copy(direction, mapping)),
        }
        in_turns(benchmark, case.ours(swap), others, QUICK_ROUNDS if quick else ROUNDS)
    os.close(file)
    benchmark.extra_info |= {"goal": GOAL, "bytes": device.bytes.numel()}
