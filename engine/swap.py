"""Copies of whole pages between the pools, beside the computation.

Two halves that meet in ``Transfer`` and ``Completed``. Whoever keeps the books (``residency.py``) prepares a transfer, with every
page in it pinned, and applies its completion between two steps. Whoever moves the bytes (here) knows no Sequence, no identity and
no free list, and may fail: a failure is a value in the completion, never an exception in the step.
"""

import queue
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from engine.pools import DevicePool, HostPool

#: Neighbouring pages travel in one copy up to this many bytes. Longer ones are faster, but the pages that were just copied should
#: still be in the processor's cache when their checksums are taken.
RUN_BYTES = 6 << 20
#: Threads of each direction: while one copies, another takes checksums.
THREADS = 2


class Direction(StrEnum):
    OUT = "out"  #: device to host
    IN = "in"  #: host to device


@dataclass(frozen=True, slots=True)
class PageMove:
    """One page. ``checksum``: on the way in, what its bytes must have."""

    device_page: int
    host_page: int
    checksum: int = 0


@dataclass(frozen=True, slots=True)
class Transfer:
    direction: Direction
    moves: tuple[PageMove, ...]
    #: on the way out: the pages will outlive the process, so they reach the disk first if the host pool asks for that
    durable: bool = False


@dataclass(frozen=True, slots=True)
class Completed:
    """``checksums`` of the bytes that were moved, page by page; ``problems`` in words, empty where all is well."""

    transfer: Transfer
    checksums: tuple[int, ...]
    problems: tuple[str, ...]
    seconds: float  #: that the copy took, without waiting in a queue


class SwapEngine(Protocol):
    """Moves bytes. ``submit`` and ``completed`` are called by the step loop alone."""

    @property
    def in_flight(self) -> int:
        """Transfers submitted and not yet returned by ``completed``."""

    def submit(self, transfer: Transfer) -> None:
        """Begin. Its pages stay as they are, on both sides, until it is completed. The order of transfers is not promised."""

    def completed(self, wait: float = 0.0) -> list[Completed]:
        """What is done. Waits up to ``wait`` seconds for the first, if nothing is yet."""

    def close(self) -> None:
        """Finish what was submitted, then end."""


class Mover:
    """Moves the bytes of one transfer between pools in plain memory, checksums and all. Any thread may call it."""

    def __init__(self, device: DevicePool, host: HostPool, reached: Callable[[str], None] = lambda point: None) -> None:
        self._device_bytes = device.bytes.numpy()
        self._host = host
        self._reached = reached

    def move(self, transfer: Transfer) -> Completed:
        self._reached(f"swap.before_{transfer.direction}")
        began = time.perf_counter()
        checksums: list[int] = []
        problems: list[str] = []
        copy = self._out if transfer.direction is Direction.OUT else self._in
        for run in neighbours(transfer.moves, self._device_bytes.shape[1]):
            try:
                checksums += copy(run)
                problems += [""] * len(run)
            except OSError as error:
                checksums += [0] * len(run)
                problems += [str(error)] * len(run)
        problems = make_durable(self._host, transfer, problems)
        if transfer.direction is Direction.IN:
            problems = verify(transfer.moves, checksums, problems)
        seconds = time.perf_counter() - began
        self._reached(f"swap.after_{transfer.direction}")
        return Completed(transfer, tuple(checksums), tuple(problems), seconds)

    def _out(self, run: tuple[PageMove, ...]) -> list[int]:
        first = run[0].device_page
        return self._host.backing.write_pages(run[0].host_page, self._device_bytes[first : first + len(run)].reshape(-1))

    def _in(self, run: tuple[PageMove, ...]) -> list[int]:
        # Straight into the device pages: no Sequence can see them before the completion says that they verified.
        first = run[0].device_page
        return self._host.backing.read_pages(run[0].host_page, self._device_bytes[first : first + len(run)].reshape(-1))


class ThreadSwap:
    """Pools in plain memory: threads for each direction. The copies release the interpreter lock, so the step goes on."""

    def __init__(
        self,
        device: DevicePool,
        host: HostPool,
        *,
        on_completed: Callable[[], None] = lambda: None,
        on_death: Callable[[BaseException], None] | None = None,
        reached: Callable[[str], None] = lambda point: None,
    ) -> None:
        """``on_completed`` wakes whoever waits for work; ``on_death``: a thread that dies leaves pages pinned for ever."""
        self._mover = Mover(device, host, reached)
        self._on_completed = on_completed
        self._on_death = on_death
        self._completions: queue.SimpleQueue[Completed] = queue.SimpleQueue()
        self._queues: dict[Direction, queue.SimpleQueue[Transfer | None]] = {way: queue.SimpleQueue() for way in Direction}
        self._in_flight = 0
        self._threads = [
            threading.Thread(target=self._run, args=(way,), name=f"swap-{way}-{number}", daemon=True)
            for way in Direction
            for number in range(THREADS)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def in_flight(self) -> int:
        return self._in_flight

    def submit(self, transfer: Transfer) -> None:
        self._in_flight += 1
        self._queues[transfer.direction].put(transfer)

    def completed(self, wait: float = 0.0) -> list[Completed]:
        done: list[Completed] = []
        while self._in_flight:
            try:
                done.append(self._completions.get(timeout=wait) if wait and not done else self._completions.get_nowait())
            except queue.Empty:
                break
            self._in_flight -= 1
        return done

    def close(self) -> None:
        for waiting in self._queues.values():
            for _ in range(THREADS):
                waiting.put(None)
        for thread in self._threads:
            thread.join()

    def _run(self, way: Direction) -> None:
        try:
            while (transfer := self._queues[way].get()) is not None:
                self._completions.put(self._mover.move(transfer))
                self._on_completed()
        except BaseException as error:
            if self._on_death is None:
                raise
            self._on_death(error)


def make_durable(host: HostPool, transfer: Transfer, problems: list[str]) -> list[str]:
    """Bring the pages of a durable transfer to the disk, if the pool asks for that. The problems, with that one."""
    if transfer.durable and host.sync:
        try:
            host.backing.sync([page.host_page for page in transfer.moves])
        except OSError as error:
            return [str(error)] * len(transfer.moves)
    return problems


def verify(moves: tuple[PageMove, ...], checksums: list[int], problems: list[str]) -> list[str]:
    """The problems, with those of pages whose bytes are not what was stored."""
    return [
        problem or ("" if got == move.checksum else "checksum differs")
        for move, got, problem in zip(moves, checksums, problems, strict=True)
    ]


def neighbours(moves: tuple[PageMove, ...], page_bytes: int) -> Iterator[tuple[PageMove, ...]]:
    """Moves cut into runs that are contiguous on both sides, each of at most ``RUN_BYTES`` (or one page).

    What is longer is cut into equal parts, so that the threads that share them end together.
    """
    longest = max(1, RUN_BYTES // page_bytes)
    begin = 0
    for end in range(1, len(moves) + 1):
        if end < len(moves) and _adjoin(moves[end - 1], moves[end]):
            continue
        parts = -(-(end - begin) // longest)
        size = -(-(end - begin) // parts)
        yield from (moves[at : min(at + size, end)] for at in range(begin, end, size))
        begin = end


def _adjoin(move: PageMove, following: PageMove) -> bool:
    return following.device_page == move.device_page + 1 and following.host_page == move.host_page + 1
