"""The api process: takes its port, serves until SIGTERM, then closes streams and ends with 0.

It comes up while Redis is away or is not our store, answers 503 with the reason, and goes on by itself when that changes.

SIGUSR2 says that another api serves the same port from now on: this one *retires*. It accepts no more, ends the streams that can be
resumed, answers what it was asked, and ends.
"""

import asyncio
import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path

import uvicorn
from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector

from engine import model_source
from service.api.app import create_app
from service.api.context import ApiOptions, Context, ServedModel
from service.api.protocol import BoundedRequest
from service.api_keys import ApiKeys
from service.listening import adopt, take_socket
from service.logs import get_logger
from service.processes import Exit
from service.settings import Settings
from service.store_access import StoreOpener
from service.tokenization import Tokenization
from service.tracing import start_tracing

_LOOK = 0.05  #: seconds between looks at what nothing tells of
_log = get_logger("api.server")


def run(
    settings: Settings,
    listen_fd: int | None = None,
    ready_fd: int | None = None,
    kill_engine: Callable[[], None] | None = None,
) -> int:
    """Serve until SIGTERM or SIGINT; the exit code. Raises ServiceError where starting again would not help.

    ``listen_fd``: the supervisor's listening socket, else our own. ``ready_fd``: is told when an api before us may retire.
    ``kill_engine``: what the dashboard's button does, where there is one.
    """
    keys = ApiKeys(settings.api_keys_file) if settings.api_keys_file is not None else None
    tracing = start_tracing("api")
    sock = take_socket(settings) if listen_fd is None else adopt(listen_fd)
    with sock, contextlib.closing(StoreOpener(settings, "api")) as source:
        context = Context(served_model(settings), source, options_of(settings), registry(), keys, tracing, kill_engine)
        serve(context, sock, ready_fd)
    if tracing is not None:
        tracing.close()
    return Exit.OK


def served_model(settings: Settings) -> ServedModel:
    """Reads the tokenizer and hashes the weights, which name the queue; loads none of them."""
    folder = model_source.resolve(settings.model)
    return ServedModel(
        model_names(settings.model, folder), model_source.fingerprint(folder), Tokenization(folder), int(folder.stat().st_mtime)
    )


def model_names(asked: str, folder: Path) -> tuple[str, ...]:
    """What clients may call the model; the first is shown. A path of this machine is nobody's business but its owner's."""
    if asked == "demo":
        return asked, folder.name
    path = Path(asked).expanduser()
    if not path.exists():
        return (asked,)
    return path.resolve().stem if path.suffix == ".gguf" else path.resolve().name, asked


def options_of(settings: Settings) -> ApiOptions:
    return ApiOptions(
        queue_limit=settings.queue_limit,
        retention_seconds=settings.retention_seconds,
        max_body_bytes=settings.max_body_bytes,
        max_prompt_chars=settings.max_prompt_chars,
        max_file_bytes=settings.max_file_bytes,
        max_files_bytes=settings.max_files_bytes,
        batch_window=settings.batch_window,
        tenant_queue_limit=settings.tenant_queue_limit,
        tenant_streams=settings.tenant_streams,
        tenant_requests_per_minute=settings.tenant_requests_per_minute,
        tenant_tokens_per_minute=settings.tenant_tokens_per_minute,
        lease_seconds=settings.lease_seconds,
    )


def registry() -> CollectorRegistry:
    """A registry with the process's own figures: memory, descriptors, garbage collection."""
    made = CollectorRegistry()
    for collector in (ProcessCollector, PlatformCollector, GCCollector):
        collector(registry=made)
    return made


class ApiServer(uvicorn.Server):
    """uvicorn, with our order of ending: it would end by the signal itself, and close the port before anyone saw a 503."""

    def __init__(self, context: Context, ready_fd: int | None = None) -> None:
        config = uvicorn.Config(
            create_app(context),
            loop="uvloop",
            http=BoundedRequest,
            ws="none",
            lifespan="on",
            access_log=False,
            log_config=None,
            server_header=False,
            timeout_keep_alive=75,
            timeout_graceful_shutdown=context.options.close_seconds,
        )
        super().__init__(config)
        self._context = context
        self._ready_fd = ready_fd
        self._tasks: dict[str, asyncio.Task[None]] = {}

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        actions = {signal.SIGTERM: self.begin_drain, signal.SIGINT: self.begin_drain, signal.SIGUSR2: self.retire}
        try:
            for number, action in actions.items():
                loop.add_signal_handler(number, action)
        except (ValueError, RuntimeError):  # not the main thread: whoever started us ends us
            yield
            return
        try:
            yield
        finally:
            for number in actions:
                loop.remove_signal_handler(number)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self._ready_fd is not None:
            self._begin("ready", self._tell_ready(self._ready_fd))

    async def _tell_ready(self, ready_fd: int) -> None:
        """Once we listen and have looked at the store: before, we would answer 503 to what the old one can do."""
        while self._context.view is None:
            await asyncio.sleep(_LOOK)
        with contextlib.suppress(BrokenPipeError):
            os.write(ready_fd, b"1")
        os.close(ready_fd)

    def retire(self) -> None:
        """In the event loop. Another api listens on the same socket, so nobody is refused when we close ours."""
        if "retire" not in self._tasks and not self._context.drain.draining:
            _log.info("retiring")
            for server in self.servers:
                server.close()
            self._context.drain.retire()
            self._begin("retire", self._drain_when_idle())

    async def _drain_when_idle(self) -> None:
        """Who is connected may ask once more, and is told to connect anew. After that only answers on their way are waited for."""
        options, state, loop = self._context.options, self.server_state, asyncio.get_running_loop()
        began = loop.time()
        while state.connections and loop.time() < began + options.idle_seconds:
            await asyncio.sleep(_LOOK)
        while state.tasks and loop.time() < began + options.retire_seconds:
            await asyncio.sleep(_LOOK)
        self._context.drain.begin()
        self.should_exit = True

    def begin_drain(self) -> None:
        """In the event loop. Streams end without a terminal event; new work gets 503 until the port closes."""
        if not self._context.drain.draining:
            _log.info("draining")
            self._context.drain.begin()
            self._begin("drain", self._end_soon())

    async def _end_soon(self) -> None:
        await asyncio.sleep(self._context.options.drain_seconds)
        self.should_exit = True

    def _begin(self, name: str, work: Coroutine[None, None, None]) -> None:
        """The event loop itself holds tasks by weak references only."""
        self._tasks[name] = asyncio.get_running_loop().create_task(work)


def serve(context: Context, sock: socket.socket, ready_fd: int | None = None) -> None:
    host, port = sock.getsockname()[:2]
    _log.info("listening", host=host, port=port, model=context.model.name)
    began = time.monotonic()
    ApiServer(context, ready_fd).run(sockets=[sock])
    _log.info("ended", seconds=round(time.monotonic() - began, 1))
