"""One reader's way through the logs of a job or of a group of them: from any position to the end, exactly once, at its own pace."""

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from service.api.context import Context
from service.api.problems import JobNotFound
from service.api.tailer import READ_LIMIT, Feed, Tailer
from service.api.views import of_tenant
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


class GroupReader:
    """Made by ``follow``. ``record``: of the first job, as it was when the reader was made."""

    def __init__(
        self,
        context: Context,
        readers: Sequence["_JobReader"],
        opening: Sequence[Progress],
        wake_up: asyncio.Event,
        resumable: bool,
    ) -> None:
        self._context = context
        self._resumable = resumable
        self._opening = deque(opening)  #: what was read when the reader was made, to be given out first
        self._open = [reader for reader, first in zip(readers, opening, strict=True) if not first.finished]
        self._wake_up = wake_up
        self._alarm: asyncio.TimerHandle | None = None
        self._client_gone = False
        self.record = opening[0].record

    def stop(self) -> None:
        """The client went away."""
        self._client_gone = True
        self._wake_up.set()

    async def next(self, timeout: float) -> Progress | None:
        """Wait for news of any job; None when there were none for ``timeout`` seconds. Raises ReaderStopped, JobGone.

        Of each job the last is ``finished``; there is nothing to wait for when all are.
        """
        if self._opening:
            return self._opening.popleft()
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout
        while True:
            self._wake_up.clear()
            if self._client_gone or self._context.drain.ends(resumable=self._resumable):
                raise ReaderStopped
            pause = deadline - loop.time()
            try:
                news = await self._news()
            except StorageError:
                news, pause = None, min(pause, RETRY_AFTER)
            if news is not None:
                return news
            if pause <= 0:
                return None
            self._wake_by(loop.time() + pause)
            await self._wake_up.wait()

    def _wake_by(self, deadline: float) -> None:
        """An alarm set for earlier stays, and wakes us for nothing once: one for each token would cost as much as the token."""
        if self._alarm is None or self._alarm.when() > deadline:
            self.close()
            self._alarm = asyncio.get_running_loop().call_at(deadline, self._ring)

    def _ring(self) -> None:
        self._alarm = None
        self._wake_up.set()

    def close(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None

    async def _news(self) -> Progress | None:
        for reader in self._open:
            news = await reader.news()
            if news is not None:
                self._open.remove(reader)
                if not news.finished:
                    self._open.append(reader)  # the others first
                return news
        return None


class _JobReader:
    """``position``: tokens delivered so far; ``record``: as of then."""

    def __init__(self, context: Context, tailer: Tailer, feed: Feed, first: Progress) -> None:
        self._context = context
        self._tailer = tailer
        self._feed = feed
        self._seen_version = 0
        self.record = first.record
        self.position = first.position

    async def news(self) -> Progress | None:
        """What is new just now. Raises JobGone and what ``storage.errors`` names."""
        progress = await self._read() if self._must_read() else self._seen()
        if progress is not None:
            self.record, self.position = progress.record, progress.position
        return progress

    def _must_read(self) -> bool:
        """The log is known to hold more than we have, and the feed does not hold it: the log was long, or we are slow."""
        if self._feed.gone:
            return False
        known = max(self.record.log_length, self._feed.start)
        return self.position < self._feed.start or self._feed.end <= self.position < known

    def _seen(self) -> Progress | None:
        feed = self._feed
        if feed.gone:
            raise JobGone
        if feed.record is None or feed.version == self._seen_version or self.position > feed.end:
            return None
        self._seen_version = feed.version
        return Progress(feed.record, self.position, feed.since(self.position))

    async def _read(self) -> Progress:
        try:
            (progress,) = await _read(self._context, [self.record.job_id], self.record.tenant, self.position)
        except JobNotFound:
            raise JobGone from None
        self._tailer.skip_to(self.record.job_id, progress.position)
        return progress


async def _read(context: Context, job_ids: Sequence[str], tenant: str, after: int) -> list[Progress]:
    """One read of the logs, outside the feeds. Raises JobNotFound and what ``storage.errors`` names."""
    reads = [LogRead(job_id, after, READ_LIMIT) for job_id in job_ids]
    read: list[Progress] = []
    for job_id, log_slice in zip(job_ids, await context.store.run(lambda store: store.read(reads)), strict=True):
        found = of_tenant(log_slice, job_id, tenant)
        # Entries newer than the record are left for the next read, so that both tell of the same moment.
        read.append(Progress(found.record, after, found.entries[: max(0, found.record.log_length - after)]))
    return read


@contextlib.asynccontextmanager
async def follow(
    context: Context, tailer: Tailer, job_ids: Sequence[str], tenant: str, after: int = 0, *, resumable: bool = True
) -> AsyncIterator[GroupReader]:
    """Read the jobs' logs from ``after`` on. Raises JobNotFound, TooManyStreams and what ``storage.errors`` names.

    ``resumable``: another api could go on from here, so the reading ends when this one is replaced.
    """
    wake_up = asyncio.Event()
    with context.streams.one_for(tenant), context.drain.waking(wake_up):
        # Watch first, then read: a change between the two is seen by both, never by neither.
        feeds = [tailer.watch(job_id, after, wake_up) for job_id in job_ids]
        try:
            opening = await _read(context, job_ids, tenant, after)
            for first in opening:
                tailer.skip_to(first.record.job_id, first.position)
            readers = [_JobReader(context, tailer, feed, first) for feed, first in zip(feeds, opening, strict=True)]
            with contextlib.closing(GroupReader(context, readers, opening, wake_up, resumable)) as reader:
                yield reader
        finally:
            for job_id in job_ids:
                tailer.unwatch(job_id, wake_up)
