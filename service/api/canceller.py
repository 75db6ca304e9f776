"""Cancels the jobs of requests that are over: the client went away, or the answer ended in an error."""

import asyncio

from service.api.context import Context
from service.logs import get_logger
from storage.errors import StorageError

_CANCEL_FOR = 60.0  #: seconds of trying
_log = get_logger("api.canceller")


class Canceller:
    """Tries for a while, for the store may be away just then."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._tasks: set[asyncio.Task[None]] = set()

    def cancel(self, job_id: str) -> None:
        task = asyncio.create_task(self._cancel(job_id))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _cancel(self, job_id: str) -> None:
        loop = asyncio.get_running_loop()
        give_up = loop.time() + _CANCEL_FOR
        while loop.time() < give_up:
            try:
                await self._context.store.run(lambda store: store.cancel(job_id))
            except StorageError:
                await asyncio.sleep(1.0)
            else:
                _log.info("cancelled_with_its_request", job_id=job_id)
                return
