"""Brings batches on: validates new ones, feeds the lines of those in progress, ends those that were cancelled or have expired.

Every api does this for every batch, and none owns one: what is written is decided by scripts (the end of a validation, the cursor
of a feed), so that two at once do double work and nothing twice, and whoever dies at any point leaves nothing to clean up.
"""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Mapping

from service.api.context import Context
from service.api.openai.batch_lines import FileGone, Line, LineRefused, job_of_refused_line, jobs_of_line, parse_line, read_lines
from service.api.openai.batch_validation import Validation
from service.api.openai.surface import Surface
from service.logs import get_logger
from storage.batch_records import BatchRecord, BatchStatus, FedLine, FeedOutcome
from storage.errors import StoreFull, StoreUnavailable, WrongStore
from storage.records import JobError

#: Lines that are made into jobs and sent together.
_TOGETHER = 16
#: Seconds until the next round where this one brought something on.
_SOON = 0.1
_log = get_logger("api.batches")


class BatchFeeder:
    """``surfaces``: by path, what a batch may be for."""

    def __init__(self, context: Context, surfaces: Mapping[str, Surface]) -> None:
        self._context = context
        self._surfaces = surfaces
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """In the event loop: tokenising waits for its threads there."""
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    async def _run(self) -> None:
        while not self._context.drain.draining:
            moved = False
            try:
                moved = await self._round()
            except (StoreUnavailable, StoreFull, WrongStore):
                pass  # the sweep says so
            except Exception:
                _log.exception("batches_failed")
            await asyncio.sleep(_SOON if moved else self._context.options.sweep_interval)

    async def _round(self) -> bool:
        """Whether any batch got further. In random order, so that many apis seldom work on the same one."""
        batches = await self._context.store.run(lambda store: store.batches.live_batches())
        random.shuffle(batches)
        moved = False
        for batch in batches:
            try:
                moved |= await self._bring_on(batch)
            except (StoreUnavailable, StoreFull, WrongStore):
                raise  # of no batch in particular
            except Exception:  # a bug that this one meets is not to hold up the others
                _log.exception("batch_failed", batch_id=batch.batch_id)
        return moved

    async def _bring_on(self, batch: BatchRecord) -> bool:
        store = self._context.store
        if await store.run(lambda store: store.batches.advance_batch(batch.batch_id)):
            return True
        surface = self._surfaces.get(batch.endpoint)
        if surface is None:  # another version's: another api knows it, or it expires
            return False
        if batch.status is BatchStatus.VALIDATING:
            return await self._validate(surface, batch)
        if batch.status is BatchStatus.IN_PROGRESS and batch.fed < batch.total:
            return await self._feed(surface, batch)
        return False

    async def _validate(self, surface: Surface, batch: BatchRecord) -> bool:
        validation = Validation(surface, batch)
        async for line in self._lines(batch):
            if not await validation.take(line):
                break
        errors = validation.errors()
        after = await self._context.store.run(lambda store: store.batches.begin_batch(batch.batch_id, validation.total, errors))
        if after is not None:
            _log.info("batch_validated", batch_id=batch.batch_id, lines=validation.total, errors=len(errors))
        return True

    async def _feed(self, surface: Surface, batch: BatchRecord) -> bool:
        room = self._context.options.batch_window - batch.live_lines
        waiting: list[FedLine] = []
        moved = False
        if room <= 0:
            return False
        async for line in self._lines(batch):
            waiting.append(await self._made(surface, batch, line))
            room -= 1
            if len(waiting) == _TOGETHER or room == 0:
                fed = await self._send(batch, waiting)
                moved |= fed > 0
                if fed < len(waiting) or room == 0:
                    return moved
                waiting = []
        return (await self._send(batch, waiting) > 0 or moved) if waiting else moved

    async def _send(self, batch: BatchRecord, lines: list[FedLine]) -> int:
        """How many of them were fed."""
        options = self._context.options
        answers = await self._context.store.run(
            lambda store: store.batches.feed(
                batch.batch_id,
                lines,
                window=options.batch_window,
                queue_limit=options.queue_limit,
                tenant_limit=options.tenant_queue_limit,
            )
        )
        fed = answers.count(FeedOutcome.OK)
        self._context.metrics.batch_lines_fed.inc(fed)
        return fed

    async def _made(self, surface: Surface, batch: BatchRecord, line: Line) -> FedLine:
        """What was validated, but for what may have changed since: an engine's size, a model."""
        custom_id = str(line.number)
        try:
            asked = parse_line(line, batch.endpoint)
            custom_id = asked.custom_id
            jobs = await jobs_of_line(surface, batch, line.number, asked)
        except LineRefused as error:
            job = job_of_refused_line(self._context, batch, line.number, custom_id)
            return FedLine(line.number, line.end, (job,), JobError(error.code, error.message))
        return FedLine(line.number, line.end, jobs)

    async def _lines(self, batch: BatchRecord) -> AsyncIterator[Line]:
        """From the first that was not fed on. Ends early where the file goes away: with its batch, then."""
        file = await self._context.store.run(lambda store: store.batches.input_file(batch.batch_id))
        if file is None:
            return
        try:
            async for line in read_lines(self._context, file, batch.fed + 1, batch.position):
                yield line
        except FileGone:
            return
