"""The api process: binds the port, serves until SIGTERM, then closes streams and ends with 0.

It comes up while Redis is away or is not our store, answers 503 with the reason, and goes on by itself when that changes.
"""

import asyncio
import contextlib
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import uvicorn
from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector

from engine import model_source
from service.api.app import create_app
from service.api.context import ApiOptions, Context, ServedModel
from service.errors import PortInUse, ServiceError
from service.logs import get_logger
from service.processes import Exit
from service.settings import Settings
from service.store_access import StoreOpener
from service.tokenization import Tokenization

_log = get_logger("api.server")


def run(settings: Settings) -> int:
    """Serve until SIGTERM or SIGINT; the exit code. Raises ServiceError where starting again would not help."""
    with bind(settings.host, settings.port) as sock, contextlib.closing(StoreOpener(settings, "api")) as source:
        serve(Context(served_model(settings), source, options_of(settings), registry()), sock)
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
        lease_seconds=settings.lease_seconds,
    )


def registry() -> CollectorRegistry:
    """A registry with the process's own figures: memory, descriptors, garbage collection."""
    made = CollectorRegistry()
    for collector in (ProcessCollector, PlatformCollector, GCCollector):
        collector(registry=made)
    return made


def bind(host: str, port: int) -> socket.socket:
    """Take the port before anything else is done, so that a taken one is refused with words. Port 0: any. Raises PortInUse.

    Nobody listens yet: until the model is known, a client is refused at once instead of being left to wait.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = found[0]
        sock = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ServiceError(f"cannot listen on {host}: {error.strerror}", "check --host") from error
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except OSError as error:
        sock.close()
        raise PortInUse(
            f"cannot listen on {host} port {port}: {error.strerror}", "stop what listens there, or choose another --port"
        ) from error
    sock.setblocking(False)
    return sock


class ApiServer(uvicorn.Server):
    """uvicorn, with our order of ending: it would end by the signal itself, and close the port before anyone saw a 503."""

    def __init__(self, context: Context) -> None:
        config = uvicorn.Config(
            create_app(context),
            loop="uvloop",
            http="httptools",
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
        self._drain: asyncio.Task[None] | None = None

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        numbers = (signal.SIGTERM, signal.SIGINT)
        try:
            for number in numbers:
                loop.add_signal_handler(number, self.begin_drain)
        except (ValueError, RuntimeError):  # not the main thread: whoever started us ends us
            yield
            return
        try:
            yield
        finally:
            for number in numbers:
                loop.remove_signal_handler(number)

    def begin_drain(self) -> None:
        """In the event loop. Streams end without a terminal event; new work gets 503 until the port closes."""
        if self._drain is None:
            _log.info("draining")
            self._context.drain.begin()
            self._drain = asyncio.get_running_loop().create_task(self._end_soon())

    async def _end_soon(self) -> None:
        await asyncio.sleep(self._context.options.drain_seconds)
        self.should_exit = True


def serve(context: Context, sock: socket.socket) -> None:
    host, port = sock.getsockname()[:2]
    _log.info("listening", host=host, port=port, model=context.model.name)
    began = time.monotonic()
    ApiServer(context).run(sockets=[sock])
    _log.info("ended", seconds=round(time.monotonic() - began, 1))
