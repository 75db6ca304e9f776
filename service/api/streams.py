"""A server-sent event stream over one job: what all surfaces share. What each event looks like is the renderer's business.

A stream ends with the job (and with whatever the renderer says then), when its client goes away, or when this process is drained;
the last two without a terminal event: the client may come back, to any api, with its position.
"""

import asyncio
from typing import Protocol

from starlette.background import BackgroundTask
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from service.api.context import Context
from service.api.reader import JobGone, JobReader, Progress, ReaderStopped, follow
from service.api.tailer import Tailer

SSE_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}


class Renderer(Protocol):
    keep_alive: bytes

    def open(self, reader: JobReader) -> Response | None:
        """Look at the job before anything is sent: raise, or answer otherwise, or None to begin the stream."""

    def render(self, progress: Progress) -> bytes:
        """Bytes for what is new; the last call has ``progress.finished``."""

    def gone(self) -> bytes:
        """The job was purged while it was read."""

    def left_early(self, job_id: str) -> None:
        """The stream ended, or could not begin, before the job's end."""


class EventStream(Response):
    """Errors before the first byte are raised from the call, and answered as problems like any other."""

    def __init__(self, context: Context, tailer: Tailer, job_id: str, after: int, renderer: Renderer) -> None:
        self.background: BackgroundTask | None = None
        self._context = context
        self._tailer = tailer
        self._job_id = job_id
        self._after = after
        self._renderer = renderer
        self.status_code = 200
        self.init_headers(SSE_HEADERS)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        done = False
        try:
            async with follow(self._context, self._tailer, self._job_id, self._after) as reader:
                other = self._renderer.open(reader)
                if other is not None:
                    done = True
                    await other(scope, receive, send)
                    return
                await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
                watcher = asyncio.create_task(watch_client(receive, reader))
                self._context.metrics.open_streams.inc()
                try:
                    done = await self._stream(reader, send)
                finally:
                    self._context.metrics.open_streams.dec()
                    watcher.cancel()
        finally:
            if not done:
                self._renderer.left_early(self._job_id)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _stream(self, reader: JobReader, send: Send) -> bool:
        """Whether the client got all there is."""
        try:
            while True:
                progress = await reader.next(self._context.options.keep_alive)
                chunk = self._renderer.keep_alive if progress is None else self._renderer.render(progress)
                if chunk:
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
                if progress is not None:
                    self._context.metrics.streamed_tokens.inc(len(progress.entries))
                    if progress.finished:
                        return True
        except JobGone:
            await send({"type": "http.response.body", "body": self._renderer.gone(), "more_body": True})
            return True
        except ReaderStopped:
            return False


async def watch_client(receive: Receive, reader: JobReader) -> None:
    """Nothing else tells of a client that goes away while there is nothing to send."""
    while (await receive())["type"] != "http.disconnect":
        pass
    reader.stop()
