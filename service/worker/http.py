"""The engine's only HTTP: metrics and health, on a thread of its own so that a busy step loop still answers."""

import json
import sys
import threading
import time
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from service.api_keys import WITHHELD_REASON, ApiKeys
from service.errors import PortInUse
from service.logs import get_logger
from service.settings import Settings
from service.version import own_version

_log = get_logger("engine.http")
_ACCEPT_AGAIN = 0.5  #: seconds
_PUBLIC = ("/livez", "/readyz")


class EngineHttp:
    """``/metrics``, ``/livez``, ``/readyz``, ``/version`` on ``engine_port``; nothing at all when that is 0.

    Where there are API keys, all but the probes needs one, as at the API. ``readiness`` gives the reasons why the engine is not
    ready (what -> why), empty when it is. Called on a server thread.
    """

    def __init__(self, settings: Settings, registry: CollectorRegistry, readiness: Callable[[], dict[str, str]]) -> None:
        self._address = (settings.host, settings.engine_port)
        self._keys = ApiKeys(settings.api_keys_file) if settings.api_keys_file is not None else None
        self._registry = registry
        self._readiness = readiness
        self._server: ThreadingHTTPServer | None = None

    def __enter__(self) -> Self:
        """Raises PortInUse."""
        if self._address[1] == 0:
            return self
        try:
            self._server = _Server(self._address, _handler_for(self))
        except OSError as error:
            host, port = self._address
            raise PortInUse(
                f"the engine's metrics and health cannot listen on {host}:{port}: {error.strerror}",
                "choose another --engine-port, or 0 to turn it off",
            ) from error
        threading.Thread(target=self._server.serve_forever, name="engine-http", daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()

    def answer(self, path: str, authorization: str) -> tuple[HTTPStatus, str, bytes]:
        """Status, content type and body for a GET of ``path``."""
        if path not in _PUBLIC and self._keys is not None and self._keys.tenant_of(authorization) is None:
            return _json(HTTPStatus.UNAUTHORIZED, {"status": "this needs an API key: send it as `Authorization: Bearer KEY`"})
        if path == "/metrics":
            return HTTPStatus.OK, CONTENT_TYPE_LATEST, generate_latest(self._registry)
        if path == "/livez":
            return _json(HTTPStatus.OK, {"status": "alive"})
        if path == "/readyz":
            reasons = self._readiness()
            if self._keys is not None:
                reasons = dict.fromkeys(reasons, WITHHELD_REASON)
            status = HTTPStatus.SERVICE_UNAVAILABLE if reasons else HTTPStatus.OK
            return _json(status, {"status": "not ready" if reasons else "ready", "reasons": reasons})
        if path == "/version":
            return _json(HTTPStatus.OK, {"name": "midsentence", "version": own_version()})
        return _json(HTTPStatus.NOT_FOUND, {"status": "not found", "paths": ["/livez", "/metrics", "/readyz", "/version"]})


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    #: A restart must not wait for TIME_WAIT; two living engines on one port are still refused.
    allow_reuse_address = True

    def get_request(self) -> tuple[Any, Any]:
        try:
            return super().get_request()
        except OSError:  # no descriptor is left: who waits to be accepted would wake us again at once, and again
            time.sleep(_ACCEPT_AGAIN)
            raise

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), ConnectionError):  # a client that did not wait for its answer is no news
            _log.exception("request_failed")


def _json(status: HTTPStatus, body: dict[str, object]) -> tuple[HTTPStatus, str, bytes]:
    return status, "application/json", json.dumps(body).encode() + b"\n"


def _handler_for(http: EngineHttp) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = 10.0  #: seconds; a client that sends nothing must not hold a thread for ever
        server_version = "midsentence"
        sys_version = ""

        def do_GET(self) -> None:
            status, content_type, body = http.answer(self.path.partition("?")[0], self.headers.get("Authorization", ""))
            self.send_response(status)
            self.send_header("Content-Type", content_type)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """A probe every few seconds is no news."""

    return Handler
