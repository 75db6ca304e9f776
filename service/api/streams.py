"""A server-sent event stream over a job or a group of them: what all surfaces share. What it looks like is the renderer's business.

A stream ends with its jobs (and with whatever the renderer says then), when its client goes away, or when this process is drained,
a resumable one also when it is replaced; then without a terminal event: the client may come back, to any api, with its position.
"""

import asyncio
from collections.abc import Sequence
from typing import Protocol

from starlette.background import BackgroundTask
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from service.api.context import Context
from service.api.reader import GroupReader, JobGone, Progress, ReaderStopped, follow
from service.api.tailer import Tailer
from storage.records import JobRecord

SSE_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}


class Renderer(Protocol):
    keep_alive: bytes
    ended: bool  #: all is said: the stream ends

    def open(self, record: JobRecord) -> Response | None:
        """Look at the (first) job before anything is sent: raise, or answer otherwise, or None to begin the stream."""

    def render(self, progress: Progress) -> bytes:
        """Bytes for what is new of one job; the last call for it has ``progress.finished``."""

    def gone(self) -> bytes:
        """A job was purged while it was read."""

    def close(self) -> None:
        """The stream is over, maybe before its jobs, or could not begin."""


class EventStream(Response):
    """Errors before the first byte are raised from the call, and answered as problems like any other."""

    def __init__(
        self,
        context: Context,
        tailer: Tailer,
        job_ids: Sequence[str],
        after: int,
        renderer: Renderer,
        *,
        resumable: bool = True,
    ) -> None:
        self.background: BackgroundTask | None = None
        self._context = context
        self._tailer = tailer
        self._job_ids = job_ids
        self._after = after
        self._renderer = renderer
        self._resumable = resumable
        self.status_code = 200
        self.init_headers(SSE_HEADERS)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            tenant = scope["state"]["tenant"]
            async with follow(self._context, self._tailer, self._job_ids, tenant, self._after, resumable=self._resumable) as reader:
                other = self._renderer.open(reader.record)
                if other is not None:
                    await other(scope, receive, send)
                    return
                await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
                watcher = asyncio.create_task(watch_client(receive, reader))
                self._context.metrics.open_streams.inc()
                try:
                    await self._stream(reader, send)
                finally:
                    self._context.metrics.open_streams.dec()
                    watcher.cancel()
        finally:
            self._renderer.close()
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _stream(self, reader: GroupReader, send: Send) -> None:
        loop, keep_alive = asyncio.get_running_loop(), self._context.options.keep_alive
        speak_by = loop.time() + keep_alive
        try:
            while not self._renderer.ended:
                progress = await reader.next(speak_by - loop.time())
                chunk = self._renderer.render(progress) if progress is not None else b""
                # News need not show: an engine that dies again and again changes a job's record, and the client hears nothing.
                if not chunk and loop.time() >= speak_by:
                    chunk = self._renderer.keep_alive
                if chunk:
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
                    speak_by = loop.time() + keep_alive
                if progress is not None:
                    self._context.metrics.streamed_tokens.inc(len(progress.entries))
        except JobGone:
            await send({"type": "http.response.body", "body": self._renderer.gone(), "more_body": True})
        except ReaderStopped:
            return


async def watch_client(receive: Receive, reader: GroupReader) -> None:
    """Nothing else tells of a client that goes away while there is nothing to send."""
    while (await receive())["type"] != "http.disconnect":
        pass
    reader.stop()
