"""uvicorn's HTTP/1.1 protocol with bounds on a request: it would buffer heads, and wait for heads and bodies, without end."""

import asyncio

from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

MAX_HEAD = 64 << 10  #: bytes of request line and headers; what one read of the socket brings may come on top
HEAD_SECONDS = 30.0  #: from a request's first byte (or the connection) to the end of its headers
BODY_PIECE = 64 << 10  #: bytes of a body, or what is left of it, that must come ...
BODY_SECONDS = 30.0  #: ... within this time: a body of 8 MiB may come over a thin line, but not a byte now and then
_TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"


class BoundedRequest(HttpToolsProtocol):
    """Answers 431 to a head that is too long, and closes a connection on which a head or a body does not come to its end."""

    _head_bytes = _body_bytes = 0
    _in_head = False
    _deadline: asyncio.TimerHandle | None = None
    _answering: RequestResponseCycle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # uvicorn's own deviation
        super().connection_made(transport)
        self._expect_within(HEAD_SECONDS)

    def connection_lost(self, exc: Exception | None) -> None:
        self._expect_nothing()
        super().connection_lost(exc)
        if self._answering is not None:  # uvicorn tells the newest request only, which may still wait behind this one
            self._answering.disconnected = True
            self._answering.message_event.set()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._answering = cycle
        super()._start_asgi_task(cycle, app)

    def data_received(self, data: bytes) -> None:
        was_in_head = self._in_head
        super().data_received(data)
        if was_in_head and self._in_head and not self.transport.is_closing():
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD:
                self.transport.write(_TOO_LARGE)
                self.transport.close()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head, self._head_bytes = True, 0
        if self._deadline is None:  # else it runs since the connection was made
            self._expect_within(HEAD_SECONDS)

    def on_headers_complete(self) -> None:
        self._in_head, self._body_bytes = False, 0
        self._expect_within(BODY_SECONDS)
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        if self._body_bytes >= BODY_PIECE:
            self._body_bytes = 0
            self._expect_within(BODY_SECONDS)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._expect_nothing()
        super().on_message_complete()

    def _expect_within(self, seconds: float) -> None:
        self._expect_nothing()
        self._deadline = self.loop.call_later(seconds, self._too_late)

    def _expect_nothing(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _too_late(self) -> None:
        if self.flow.read_paused:  # it is we who do not read: an earlier answer is still on its way
            self._expect_within(BODY_SECONDS)
        else:
            self.transport.close()
