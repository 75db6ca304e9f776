"""The outermost layer: request ids, the drain, the access log, metrics, and a form for every error."""

import re
import secrets
import time
from http import HTTPStatus

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.api.context import Context
from service.api.problems import ApiError, BodyTooLarge, Draining, InvalidRequest, error_response, from_http_exception, problem_of
from service.api.request_spans import RequestSpan
from service.logs import bound, get_logger
from storage.errors import StorageError

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")
_PROBES = frozenset({"/livez", "/readyz", "/health", "/metrics", "/version"})
_METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
_CLIENT_CLOSED = 499  #: nginx's code for a client that left before its answer; for our log and metrics only
_log = get_logger("api")


class Edge:
    """Pure ASGI, so that a stream's chunks pass through one function and nothing else."""

    def __init__(self, app: ASGIApp, context: Context) -> None:
        self._app = app
        self._context = context

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("X-Request-Id", "")
        request_id = given if _REQUEST_ID.fullmatch(given) else f"req_{secrets.token_hex(16)}"
        scope.setdefault("state", {})["request_id"] = request_id
        exchange = _Exchange(scope, send, request_id, self._context)
        span = self._span(scope, request_id)
        try:
            with bound(request_id=request_id):
                await self._answer(scope, receive, exchange)
                self._account(scope, exchange)
        finally:
            if span is not None:
                span.end(_route_of(scope), exchange.status)

    def _span(self, scope: Scope, request_id: str) -> RequestSpan | None:
        """The trace context that jobs keep is this span's; without tracing the client's own."""
        tracing = self._context.tracing
        span = RequestSpan(tracing, scope, request_id) if tracing is not None and scope["path"] not in _PROBES else None
        given = Headers(scope=scope).get("traceparent", "")
        scope["state"]["traceparent"] = span.traceparent if span is not None else given if _TRACEPARENT.fullmatch(given) else ""
        return span

    async def _answer(self, scope: Scope, receive: Receive, exchange: "_Exchange") -> None:
        try:
            if self._context.drain.draining and scope["method"] == "POST":
                raise Draining("this server is about to end and takes no new work: try again")
            await self._app(scope, receive, exchange.send)
        except ClientDisconnect:
            exchange.status = exchange.status or _CLIENT_CLOSED
        except Exception as error:
            if problem_of(error).status == HTTPStatus.INTERNAL_SERVER_ERROR:
                _log.exception("request_failed", path=scope["path"])
            if exchange.status:
                raise  # the server closes the connection: half an answer must not look whole
            response = error_response(error, path=scope["path"], request_id=exchange.request_id)
            await response(scope, receive, exchange.send)

    def _account(self, scope: Scope, exchange: "_Exchange") -> None:
        route = _route_of(scope)
        method = scope["method"] if scope["method"] in _METHODS else "other"
        metrics = self._context.metrics
        metrics.http_requests.labels(method, route, str(exchange.status)).inc()
        if exchange.first_byte is not None:
            metrics.http_request_seconds.labels(method, route).observe(exchange.first_byte)
        level = _log.debug if route in _PROBES else _log.info
        seconds = round(time.monotonic() - exchange.began, 6)
        level("request", method=scope["method"], path=scope["path"], status=exchange.status, seconds=seconds)


def _route_of(scope: Scope) -> str:
    """Never the path as sent: a label for each job id would never end."""
    return str(getattr(scope.get("route"), "path", "unmatched"))


class _Exchange:
    """One request's answer on its way out: gets the request id, is timed."""

    def __init__(self, scope: Scope, send: Send, request_id: str, context: Context) -> None:
        self._scope = scope
        self._send = send
        self._drain = context.drain
        self._rates = context.rates
        self.request_id = request_id
        self.began = time.monotonic()
        self.first_byte: float | None = None
        self.status = 0

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.first_byte = time.monotonic() - self.began
            headers = MutableHeaders(scope=message)
            headers["X-Request-Id"] = self.request_id
            if self._drain.retiring or self._drain.draining:
                headers["Connection"] = "close"  # the next request is for another api
            if self._scope["method"] == "POST" and "tenant" in self._scope["state"]:
                headers.update(self._rates.headers(self._scope["state"]["tenant"]))
        await self._send(message)


def add_error_handlers(app: FastAPI) -> None:
    """What routes raise becomes an answer here; what nobody expected, in ``Edge``."""

    async def answer(request: Request, error: Exception) -> Response:
        if isinstance(error, HTTPException):
            error = from_http_exception(error, request.method, request.url.path, allowed_methods(request))
        elif isinstance(error, RequestValidationError):
            error = InvalidRequest(str(error.errors()[0]["msg"]))
        if problem_of(error).status == HTTPStatus.INTERNAL_SERVER_ERROR:
            _log.error("request_failed", path=request.url.path, error=type(error).__name__, exc_info=error)
        response = error_response(error, path=request.url.path, request_id=request.state.request_id)
        if isinstance(error, BodyTooLarge):
            response.headers["Connection"] = "close"  # the rest of the body is on its way
        return response

    for kind in (ApiError, StorageError, HTTPException, RequestValidationError):
        app.add_exception_handler(kind, answer)


def allowed_methods(request: Request) -> str:
    """For an ``Allow`` header: the router's own names the methods of one route, and here each method has a route of its own."""
    routes = request.app.routes
    named = (m for m in _METHODS if any(route.matches({**request.scope, "method": m})[0] is Match.FULL for route in routes))
    return ", ".join(named)


async def read_body(request: Request, limit: int) -> bytes:
    """The whole body; stops reading at the limit, whatever Content-Length said. Raises BodyTooLarge."""
    too_large = BodyTooLarge(f"the body is larger than {limit} bytes (--max-body-bytes)")
    announced = request.headers.get("Content-Length", "")
    if announced.isdigit() and int(announced) > limit:
        raise too_large
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > limit:
            raise too_large
    return bytes(body)


def check_query(request: Request, allowed: frozenset[str] = frozenset()) -> None:
    """A misspelt filter that is ignored would answer another question than was asked."""
    for name in request.query_params:
        if name not in allowed:
            known = f"; known here: {', '.join(sorted(allowed))}" if allowed else ""
            raise InvalidRequest(f"{name[:64]}: this query parameter is not known{known}", param=name[:64], code="unknown_field")
