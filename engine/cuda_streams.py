"""The device's half of ``CudaSwap``: a stream for each direction, page-locked staging, events."""

from typing import Protocol

import torch

from engine.pools import DevicePool, PageBytes
from engine.swap import RUN_BYTES, Direction


class Mark(Protocol):
    """A point in a stream's work; a ``torch.cuda.Event`` is one."""

    def synchronize(self) -> None:
        """Wait until the work has come to this point."""


class Lane(Protocol):
    """Copies of one direction, in order, between pages and two staging buffers. What fails raises RuntimeError."""

    @property
    def staging(self) -> tuple[PageBytes, PageBytes]:
        """uint8 [pages of the longest run, page_bytes] each."""

    def mark(self) -> Mark:
        """This point of the computation. Called by the step thread, as ``join`` is; all else by the lane's own."""

    def after(self, mark: Mark) -> None:
        """No copy begun from now on runs before the computation has come to ``mark``."""

    def copy(self, buffer: int, at: int, device_page: int, num_pages: int) -> Mark:
        """Begin to copy between pages ``at ..`` of a staging buffer and neighbouring pages of the pool."""

    def drain(self) -> None:
        """Wait for every copy begun."""

    def join(self, mark: Mark) -> None:
        """No computation queued from now on runs before the copies have come to ``mark``."""


class CudaLane:
    """The ``Lane`` of a CUDA device. Beside the computation, never in its stream: a copy would hold up the next step."""

    def __init__(self, pool: DevicePool, way: Direction) -> None:
        self._pages = pool.bytes
        self._way = way
        self._device = pool.bytes.device
        self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        page_bytes = pool.bytes.shape[1]
        longest = max(1, RUN_BYTES // page_bytes)
        # From pageable memory the driver would copy twice and hold up the thread.
        self._buffers = tuple(torch.empty(longest, page_bytes, dtype=torch.uint8, pin_memory=True) for _ in range(2))
        self.staging: tuple[PageBytes, PageBytes] = (self._buffers[0].numpy(), self._buffers[1].numpy())

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def after(self, mark: Mark) -> None:
        assert isinstance(mark, torch.cuda.Event)
        self._stream.wait_event(mark)

    def copy(self, buffer: int, at: int, device_page: int, num_pages: int) -> torch.cuda.Event:
        staged = self._buffers[buffer][at : at + num_pages]
        pages = self._pages[device_page : device_page + num_pages]
        source, target = (pages, staged) if self._way is Direction.OUT else (staged, pages)
        # Blocking: whoever waits for it sleeps, and the cores belong to the step.
        done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
            done.record(self._stream)
        return done

    def drain(self) -> None:
        self._stream.synchronize()

    def join(self, mark: Mark) -> None:
        assert isinstance(mark, torch.cuda.Event)
        torch.cuda.current_stream(self._device).wait_event(mark)
