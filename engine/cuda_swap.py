"""The ``SwapEngine`` of a CUDA device: page-locked staging between its pages and the host's backing.

A copy has two halves, the transfer to or from the device (DMA) and the read or write of the backing, and two staging buffers let
them overlap: while the thread reads or writes one, the device fills or drains the other. A page is one extent with all layers, and
neighbouring pages travel together, so nothing here is done per layer.

Order, in both directions by events: copies begin after the computation that was queued when the transfer was submitted (it may
still write a page that leaves, or read the page that another is to replace), and a transfer is completed after its last copy.
"""

import queue
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby

from engine.cuda_streams import CudaLane, Lane, Mark
from engine.pools import DevicePool, HostPool, PageBytes
from engine.swap import Completed, Direction, PageMove, Transfer, make_durable, neighbours, verify

Run = tuple[PageMove, ...]


@dataclass(frozen=True, slots=True)
class _Submitted:
    transfer: Transfer
    computed: Mark  #: the computation that its copies come after


@dataclass(frozen=True, slots=True)
class _Moved:
    completed: Completed
    copied: Mark | None = None  #: on the way in: its last copy, None where there was none


class CudaSwap:
    """Two threads, each with a stream of its own; see the top of this file. Arguments as those of ``ThreadSwap``."""

    def __init__(
        self,
        device: DevicePool,
        host: HostPool,
        *,
        on_completed: Callable[[], None] = lambda: None,
        on_death: Callable[[BaseException], None] | None = None,
        reached: Callable[[str], None] = lambda point: None,
        lanes: Mapping[Direction, Lane] | None = None,
    ) -> None:
        self._page_bytes = device.bytes.shape[1]
        self._host = host
        self._on_completed = on_completed
        self._on_death = on_death
        self._reached = reached
        self._lanes: Mapping[Direction, Lane] = lanes or {way: CudaLane(device, way) for way in Direction}
        self._completions: queue.SimpleQueue[_Moved] = queue.SimpleQueue()
        self._queues: dict[Direction, queue.SimpleQueue[_Submitted | None]] = {way: queue.SimpleQueue() for way in Direction}
        self._in_flight = 0
        self._threads = [threading.Thread(target=self._run, args=(way,), name=f"swap-{way}", daemon=True) for way in Direction]
        for thread in self._threads:
            thread.start()

    @property
    def in_flight(self) -> int:
        return self._in_flight

    def submit(self, transfer: Transfer) -> None:
        self._in_flight += 1
        try:
            computed = self._lanes[transfer.direction].mark()
        except RuntimeError as error:
            self._completions.put(_Moved(_failed(transfer, error, 0.0)))
            self._on_completed()
            return
        self._queues[transfer.direction].put(_Submitted(transfer, computed))

    def completed(self, wait: float = 0.0) -> list[Completed]:
        done: list[Completed] = []
        while self._in_flight:
            try:
                moved = self._completions.get(timeout=wait) if wait and not done else self._completions.get_nowait()
            except queue.Empty:
                break
            self._in_flight -= 1
            done.append(self._join(moved))
        return done

    def close(self) -> None:
        for waiting in self._queues.values():
            waiting.put(None)
        for thread in self._threads:
            thread.join()

    def _join(self, moved: _Moved) -> Completed:
        """The step's half of a completion: what it queues from now on sees the pages that came in."""
        if moved.copied is not None:
            try:
                self._lanes[Direction.IN].join(moved.copied)
            except RuntimeError as error:
                return _failed(moved.completed.transfer, error, moved.completed.seconds)
        return moved.completed

    def _run(self, way: Direction) -> None:
        try:
            while (submitted := self._queues[way].get()) is not None:
                self._completions.put(self._move(submitted, self._lanes[way]))
                self._on_completed()
        except BaseException as error:
            if self._on_death is None:
                raise
            self._on_death(error)

    def _move(self, submitted: _Submitted, lane: Lane) -> _Moved:
        transfer = submitted.transfer
        self._reached(f"swap.before_{transfer.direction}")
        began = time.perf_counter()
        copied = None
        try:
            lane.after(submitted.computed)
            if transfer.direction is Direction.OUT:
                checksums, problems = self._out(transfer, lane)
            else:
                checksums, problems, copied = self._in(transfer, lane)
            completed = Completed(transfer, tuple(checksums), tuple(problems), time.perf_counter() - began)
        except RuntimeError as error:
            with suppress(RuntimeError):
                lane.drain()  # its pages and the staging are used again
            completed = _failed(transfer, error, time.perf_counter() - began)
        self._reached(f"swap.after_{transfer.direction}")
        return _Moved(completed, copied)

    def _out(self, transfer: Transfer, lane: Lane) -> tuple[list[int], list[str]]:
        checksums: list[int] = []
        problems: list[str] = []
        runs = list(neighbours(transfer.moves, self._page_bytes))
        copies: list[Mark] = []
        # One copy ahead of the writes: it fills one buffer while the other goes to the backing.
        for index in range(len(runs) + 1):
            if index < len(runs):
                copies.append(lane.copy(index % 2, 0, runs[index][0].device_page, len(runs[index])))
            if index > 0:
                copies[index - 1].synchronize()
                written = self._write(runs[index - 1], lane.staging[(index - 1) % 2])
                checksums += written[0]
                problems += written[1]
        return checksums, make_durable(self._host, transfer, problems)

    def _in(self, transfer: Transfer, lane: Lane) -> tuple[list[int], list[str], Mark | None]:
        """Checksums, problems, and the last copy, which has come to its end. A page that does not verify is not copied."""
        checksums: list[int] = []
        problems: list[str] = []
        copies: list[Mark | None] = [None, None]  # the last from each buffer
        last = None
        for index, run in enumerate(neighbours(transfer.moves, self._page_bytes)):
            buffer = index % 2
            if (draining := copies[buffer]) is not None:
                draining.synchronize()
            found, wrong = self._read(run, lane.staging[buffer])
            checksums += found
            problems += wrong
            for verified, stretch in groupby(range(len(run)), key=lambda page: not wrong[page]):
                if verified:
                    first, *rest = stretch
                    last = copies[buffer] = lane.copy(buffer, first, run[first].device_page, 1 + len(rest))
        if last is not None:
            last.synchronize()
        return checksums, problems, last

    def _write(self, run: Run, staging: PageBytes) -> tuple[list[int], list[str]]:
        try:
            return self._host.backing.write_pages(run[0].host_page, staging[: len(run)].reshape(-1)), [""] * len(run)
        except OSError as error:
            return [0] * len(run), [str(error)] * len(run)

    def _read(self, run: Run, staging: PageBytes) -> tuple[list[int], list[str]]:
        """Checksums as read, and what is wrong with each page; "" where nothing is."""
        try:
            found = self._host.backing.read_pages(run[0].host_page, staging[: len(run)].reshape(-1))
        except OSError as error:
            return [0] * len(run), [str(error)] * len(run)
        return found, verify(run, found, [""] * len(run))


def _failed(transfer: Transfer, error: RuntimeError, seconds: float) -> Completed:
    """The device failed: of no page of the transfer anything is known."""
    count = len(transfer.moves)
    return Completed(transfer, (0,) * count, (str(error) or repr(error),) * count, seconds)
