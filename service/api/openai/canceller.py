"""Ends the jobs of requests that are over: the client went away, the answer ended in an error, or was not to be kept."""

import asyncio
from collections.abc import Callable

from service.api.context import Context
from service.logs import get_logger
from storage.errors import StorageError
from storage.job_store import JobStore

_TRY_FOR = 60.0  #: seconds
_log = get_logger("api.canceller")


class Canceller:
    """Tries for a while, for the store may be away just then."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._tasks: set[asyncio.Task[None]] = set()

    def cancel(self, job_id: str) -> None:
        self._begin("cancelled_with_its_request", job_id, lambda store: store.cancel(job_id))

    def delete(self, job_id: str) -> None:
        self._begin("deleted_with_its_request", job_id, lambda store: store.delete(job_id))

    def _begin(self, event: str, job_id: str, call: Callable[[JobStore], object]) -> None:
        task = asyncio.create_task(self._try(event, job_id, call))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _try(self, event: str, job_id: str, call: Callable[[JobStore], object]) -> None:
        loop = asyncio.get_running_loop()
        give_up = loop.time() + _TRY_FOR
        while loop.time() < give_up:
            try:
                await self._context.store.run(call)
            except StorageError:
                await asyncio.sleep(1.0)
            else:
                _log.info(event, job_id=job_id)
                return
