"""One thread that follows the token logs of all open streams.

It waits for the store's hint, reads every job that changed in one round trip, and hands the slices to the event loop in one
wake-up. Hints may be lost, so once a second it also reads the jobs that were read longest ago: one round trip's worth, which is all
of them where few are watched. When one of these has news that no hint told of, the next such look is at all.

A *feed* is what the event loop knows of one job: its latest record and a window of its newest entries, shared by all its readers.
Nobody is buffered for: who falls out of the window reads the log itself.

All feeds belong to the event loop; the thread sees only a snapshot of (job id, position), taken under a lock.
"""

import asyncio
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from itertools import islice

from service.api.context import StoreCalls
from service.logs import get_logger
from storage.errors import StorageError
from storage.records import JobRecord, LogEntry, LogRead, LogSlice

WINDOW = 256  #: entries kept for each job that somebody reads
READ_LIMIT = 500  #: entries of one job in one read
JOBS_PER_READ = 64
MAX_BACK_OFF = 1.0

_log = get_logger("api.tailer")


@dataclass(slots=True)
class Feed:
    """``entries`` are tokens ``[start, end)`` of the job. Readers wait on their own events in ``readers``."""

    start: int
    entries: deque[LogEntry] = field(default_factory=deque)
    record: JobRecord | None = None
    gone: bool = False
    version: int = 0  #: rises with everything a reader may want to know
    readers: set[asyncio.Event] = field(default_factory=set)

    @property
    def end(self) -> int:
        return self.start + len(self.entries)

    def since(self, position: int) -> tuple[LogEntry, ...]:
        """Entries from ``position`` on; only for ``start <= position <= end``."""
        skip = position - self.start
        return tuple(self.entries) if skip == 0 else tuple(self.entries)[skip:]

    def skip_to(self, position: int) -> None:
        """A reader read up to here by itself: the thread need not read it again."""
        if position > self.end:
            self.entries.clear()
            self.start = position

    def merge(self, found: LogSlice | None) -> None:
        if found is None:
            self.gone = True
        else:
            # Entries newer than the record are left for the next read: so record and entries always tell of the same moment.
            visible = found.entries[: max(0, found.record.log_length - found.after)]
            fresh = visible[self.end - found.after :] if found.after <= self.end else ()
            if not fresh and found.record == self.record:
                return
            self.record = found.record
            self.entries.extend(fresh)
            while len(self.entries) > WINDOW:
                self.entries.popleft()
                self.start += 1
        self.version += 1
        for reader in self.readers:
            reader.set()


class Tailer:
    """Start and stop it with the event loop that the streams run in."""

    def __init__(self, calls: StoreCalls, poll_interval: float) -> None:
        self._calls = calls
        self._poll_interval = poll_interval
        self._feeds: dict[str, Feed] = {}
        self._lock = threading.Lock()
        #: job id -> end of its feed, what was read longest ago first; the thread's view, under the lock
        self._positions: dict[str, int] = {}
        self._all_due = True  #: the thread's: hints may have been lost
        self._over: set[str] = set()  #: the thread's: jobs that were read to have ended, or to be gone
        self._watching = threading.Event()
        self._stopping = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    # --- event loop ------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, name="tailer", daemon=True)
        self._thread.start()

    async def stop(self) -> None:
        self._stopping = True
        self._watching.set()
        if self._thread is not None:
            # A store call in flight may take its whole time-out; the thread is a daemon, and nothing depends on its end.
            await asyncio.to_thread(self._thread.join, 2 * self._poll_interval)

    def watch(self, job_id: str, position: int, reader: asyncio.Event) -> Feed:
        """Follow the job; ``reader`` is set whenever its feed changes. Call before reading the log: then no change is missed."""
        feed = self._feeds.get(job_id)
        if feed is None:
            feed = self._feeds[job_id] = Feed(position)
            self._publish(job_id, position)
        feed.readers.add(reader)
        return feed

    def unwatch(self, job_id: str, reader: asyncio.Event) -> None:
        feed = self._feeds.get(job_id)
        if feed is None:
            return
        feed.readers.discard(reader)
        if not feed.readers:
            del self._feeds[job_id]
            with self._lock:
                del self._positions[job_id]
                if not self._positions:
                    self._watching.clear()

    def skip_to(self, job_id: str, position: int) -> None:
        feed = self._feeds.get(job_id)
        if feed is not None and position > feed.end:
            feed.skip_to(position)
            self._publish(job_id, position)

    def _publish(self, job_id: str, position: int) -> None:
        with self._lock:
            self._positions.pop(job_id, None)
            self._positions[job_id] = position
            self._watching.set()

    def _merge(self, found: list[tuple[str, LogSlice | None]]) -> None:
        for job_id, log_slice in found:
            feed = self._feeds.get(job_id)
            if feed is not None:
                feed.merge(log_slice)
                self._publish(job_id, feed.end)

    # --- thread ----------------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        back_off = next_poll = 0.0
        while not self._stopping:
            # Hints are taken even while nobody reads: else they would pile up in Redis until it closes the connection.
            idle = not self._watching.wait(self._poll_interval)
            try:
                patience = self._poll_interval if next_poll else 0.0
                hinted = self._calls.run_here(lambda store, patience=patience: store.wait_hint(patience))  # type: ignore[misc]
                now = time.monotonic()
                due = now >= next_poll
                if idle or due:
                    next_poll = 0.0 if idle else now + self._poll_interval
                if not idle:
                    self._look(hinted, poll=due)
                back_off = 0.0
            except StorageError as error:
                # For an open stream, a store that is away is a pause.
                if not back_off:
                    _log.warning("store_away", error=str(error))
                back_off = min(MAX_BACK_OFF, 2 * back_off or 0.05)
                next_poll, self._all_due = 0.0, True
                time.sleep(back_off)
            except Exception:
                if not self._stopping:  # the event loop may be closed already
                    _log.exception("tailer_failed")
                time.sleep(MAX_BACK_OFF)

    def _look(self, hinted: frozenset[str], *, poll: bool) -> None:
        """Read the jobs that changed, and those whose turn it is to be polled."""
        with self._lock:
            positions = dict(self._positions)
        self._over &= positions.keys()
        wanted = positions.keys() & hinted
        if poll:
            wanted |= set(islice(positions, None if self._all_due else JOBS_PER_READ))
            self._all_due = False
        news = self._read([LogRead(job_id, positions[job_id], READ_LIMIT) for job_id in wanted])
        if news - hinted:
            self._all_due = True

    def _read(self, reads: list[LogRead]) -> set[str]:
        """Read these, again and again while a log has more than one read holds. Answers with the jobs that have news."""
        news: set[str] = set()
        while reads and not self._stopping:
            more: list[LogRead] = []
            for first in range(0, len(reads), JOBS_PER_READ):
                batch = reads[first : first + JOBS_PER_READ]
                slices = self._calls.run_here(lambda store, batch=batch: store.read(batch))  # type: ignore[misc]
                found = [(read.job_id, log_slice) for read, log_slice in zip(batch, slices, strict=True)]
                self._hand_over(found)
                over = {job_id for job_id, log_slice in found if log_slice is None or log_slice.record.status.terminal}
                news |= {job_id for job_id, log_slice in found if log_slice is not None and log_slice.entries} | over - self._over
                self._over |= over
                more += [_next_read(log_slice) for _, log_slice in found if log_slice is not None and _has_more(log_slice)]
            reads = more
        return news

    def _hand_over(self, found: list[tuple[str, LogSlice | None]]) -> None:
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._merge, found)


def _has_more(found: LogSlice) -> bool:
    return len(found.entries) == READ_LIMIT and found.after + READ_LIMIT < found.record.log_length


def _next_read(found: LogSlice) -> LogRead:
    return LogRead(found.record.job_id, found.after + len(found.entries), READ_LIMIT)
