"""One reader's way through one job's log: from any position to the end, exactly once, at the reader's own pace."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass

from service.api.context import Context
from service.api.problems import JobNotFound
from service.api.tailer import READ_LIMIT, Feed, Tailer
from storage.errors import StorageError
from storage.records import JobRecord, LogEntry, LogRead

RETRY_AFTER = 0.5  #: seconds between reads of a store that is away


class ReaderStopped(Exception):
    """The client went away or this process is about to end: close without a terminal event."""


class JobGone(Exception):
    """The job was purged while it was read."""


@dataclass(frozen=True, slots=True)
class Progress:
    """What is new: tokens ``[after, after + len(entries))``, and the record of the same moment."""

    record: JobRecord
    after: int
    entries: tuple[LogEntry, ...]

    @property
    def position(self) -> int:
        return self.after + len(self.entries)

    @property
    def finished(self) -> bool:
        """There will be nothing more."""
        return self.record.status.terminal and self.position >= self.record.log_length


class JobReader:
    """Made by ``follow``. ``position``: tokens delivered so far; ``record``: as of then."""

    def __init__(self, context: Context, tailer: Tailer, feed: Feed, first: Progress, wake_up: asyncio.Event) -> None:
        self._context = context
        self._tailer = tailer
        self._feed = feed
        self._wake_up = wake_up
        self._first: Progress | None = first
        self._seen_version = 0
        self._client_gone = False
        self.record = first.record
        self.position = first.after

    def stop(self) -> None:
        """The client went away."""
        self._client_gone = True
        self._wake_up.set()

    async def next(self, timeout: float) -> Progress | None:
        """Wait for news; None when there were none for ``timeout`` seconds. Raises ReaderStopped, JobGone."""
        progress, self._first = self._first, None
        if progress is None:
            progress = await self._wait(timeout)
        if progress is not None:
            self.record, self.position = progress.record, progress.position
        return progress

    async def _wait(self, timeout: float) -> Progress | None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout
        while True:
            self._wake_up.clear()
            if self._client_gone or self._context.drain.draining:
                raise ReaderStopped
            pause = deadline - loop.time()
            if self._must_read():
                try:
                    return await self._read()
                except StorageError:
                    pause = min(pause, RETRY_AFTER)
            elif (news := self._news()) is not None:
                return news
            if pause <= 0:
                return None
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._wake_up.wait()

    def _must_read(self) -> bool:
        """The log is known to hold more than we have, and the feed does not hold it: the log was long, or we are slow."""
        if self._feed.gone:
            return False
        known = max(self.record.log_length, self._feed.start)
        return self.position < self._feed.start or self._feed.end <= self.position < known

    def _news(self) -> Progress | None:
        feed = self._feed
        if feed.gone:
            raise JobGone
        if feed.record is None or feed.version == self._seen_version or self.position > feed.end:
            return None
        self._seen_version = feed.version
        return Progress(feed.record, self.position, feed.since(self.position))

    async def _read(self) -> Progress:
        try:
            progress = await read_progress(self._context, self.record.job_id, self.position)
        except JobNotFound:
            raise JobGone from None
        self._tailer.skip_to(self.record.job_id, progress.position)
        return progress


async def read_progress(context: Context, job_id: str, after: int) -> Progress:
    """One read of the log, outside the feed. Raises JobNotFound and what ``storage.errors`` names."""
    found = (await context.store.run(lambda store: store.read([LogRead(job_id, after, READ_LIMIT)])))[0]
    if found is None:
        raise JobNotFound(f"there is no job {job_id}")
    # Entries newer than the record are left for the next read, so that both tell of the same moment.
    return Progress(found.record, after, found.entries[: max(0, found.record.log_length - after)])


@contextlib.asynccontextmanager
async def follow(context: Context, tailer: Tailer, job_id: str, after: int) -> AsyncIterator[JobReader]:
    """Read the job's log from ``after`` on. Raises JobNotFound and what ``storage.errors`` names."""
    wake_up = asyncio.Event()
    # Watch first, then read: a change between the two is seen by both, never by neither.
    feed = tailer.watch(job_id, after, wake_up)
    try:
        first = await read_progress(context, job_id, after)
        tailer.skip_to(job_id, first.position)
        with context.drain.waking(wake_up):
            yield JobReader(context, tailer, feed, first, wake_up)
    finally:
        tailer.unwatch(job_id, wake_up)
