"""A client of the native API that rides over restarts: submissions are sent again safely, streams go on where they stopped."""

import json
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self
from urllib.parse import quote, urlsplit

import httpx
from httpx_sse import ServerSentEvent, SSEError, connect_sse

from service.errors import ServiceError
from service.settings import is_loopback

TERMINAL_EVENTS = frozenset({"done", "failed", "cancelled"})
_TRY_AGAIN = frozenset({429, 502, 503, 504})
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 2.0


class ClientError(ServiceError):
    """The server refused, or did not answer for as long as we were told to wait."""

    exit_code = 1


class StreamBroken(ClientError):
    """A stream lost or repeated a token: what this product exists to prevent."""


@dataclass(frozen=True, slots=True)
class Event:
    """``kind`` as the server names it, or "lost" (connection, with the reason in ``data``) and "resumed", which are ours."""

    kind: str
    data: dict[str, Any]


class JobClient:
    """``patience``: seconds without any answer after which a call gives up. One connection pool; not thread safe."""

    def __init__(
        self, url: str, *, api_key: str = "", patience: float = 600.0, transport: httpx.BaseTransport | None = None
    ) -> None:
        self.url = url.rstrip("/")
        self._patience = patience
        self._http = httpx.Client(
            base_url=self.url,
            headers={"Authorization": f"Bearer {api_key}"} if api_key else None,
            timeout=httpx.Timeout(10.0, read=45.0),  # the server sends a comment every 15 s
            trust_env=not is_loopback(urlsplit(url).hostname or ""),  # a proxy variable must not catch what goes to this machine
            transport=transport,
        )

    def submit(self, body: dict[str, Any], *, idempotency_key: str | None = None) -> str:
        """The job's id. Sent with an idempotency key, so that sending it again after a lost reply finds the same job."""
        headers = {"Idempotency-Key": idempotency_key or str(uuid.uuid4())}
        return str(self._answer("POST", "/v1/jobs", json=body, headers=headers)["id"])

    def job(self, job_id: str) -> dict[str, Any]:
        return self._answer("GET", _path(job_id))

    def jobs(self, *, status: str | None = None, limit: int = 20, cursor: str | None = None) -> dict[str, Any]:
        wanted = {"status": status, "limit": limit, "cursor": cursor}
        return self._answer("GET", "/v1/jobs", params={name: value for name, value in wanted.items() if value is not None})

    def cancel(self, job_id: str) -> dict[str, Any]:
        return self._answer("POST", f"{_path(job_id)}/cancel")

    def follow(self, job_id: str, *, after: int = 0) -> Iterator[Event]:
        """The job's events after the first ``after`` tokens, each token exactly once, to the terminal event.

        Raises StreamBroken when the server breaks that promise.
        """
        seen, lost, waiting = after, False, _Waiting(self._patience)
        while True:
            reason, again_in = "the stream ended early", 0.0
            try:
                headers = {"Last-Event-ID": str(seen)} if seen else {}
                with connect_sse(self._http, "GET", f"{_path(job_id)}/events", headers=headers) as source:
                    if source.response.status_code == 204:
                        return
                    if source.response.status_code in _TRY_AGAIN:
                        again_in = _retry_after(source.response)
                        raise httpx.TransportError(f"status {source.response.status_code}")
                    _raise_for(source.response)
                    for message in source.iter_sse():
                        if lost:
                            yield Event("resumed", {"after": seen, "pause": waiting.waited()})
                        lost, waiting = False, _Waiting(self._patience)
                        if not message.data:  # a keep-alive comment: httpx-sse makes an empty event of it once an id was seen
                            continue
                        event = _parse(message)
                        seen = _check_order(event, message, seen)
                        yield event
                        if event.kind in TERMINAL_EVENTS:
                            return
            except (httpx.TransportError, SSEError) as error:
                reason = str(error) or type(error).__name__
            if not lost:
                lost = True
                yield Event("lost", {"reason": reason, "after": seen})
            waiting.pause(f"{self.url} does not answer ({reason}); the job goes on: follow it again later", again_in)

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _answer(self, method: str, path: str, **how: Any) -> dict[str, Any]:
        return self._ask(lambda: self._http.request(method, path, **how))

    def _ask(self, send: Callable[[], httpx.Response]) -> dict[str, Any]:
        """``send``, again and again, until there is an answer or patience is over."""
        waiting = _Waiting(self._patience)
        while True:
            try:
                response = send()
            except httpx.TransportError as error:
                waiting.pause(f"{self.url} does not answer: {error or type(error).__name__}")
                continue
            if response.status_code in _TRY_AGAIN and not waiting.over:
                waiting.pause(problem_text(response), _retry_after(response))
                continue
            _raise_for(response)
            answer: dict[str, Any] = response.json()
            return answer


class _Waiting:
    """Growing pauses, until patience is over."""

    def __init__(self, patience: float) -> None:
        self._began = time.monotonic()
        self._patience = patience
        self._next = _FIRST_PAUSE

    @property
    def over(self) -> bool:
        return self.waited() >= self._patience

    def waited(self) -> float:
        return time.monotonic() - self._began

    def pause(self, why: str, at_least: float = 0.0, sleep: Callable[[float], None] = time.sleep) -> None:
        if self.over:
            raise ClientError(why, "is `midsentence serve` running there? --url names another server")
        sleep(max(self._next, min(at_least, _LONGEST_PAUSE)))
        self._next = min(self._next * 1.5, _LONGEST_PAUSE)


def _path(job_id: str) -> str:
    return f"/v1/jobs/{quote(job_id, safe='')}"


def _parse(message: ServerSentEvent) -> Event:
    try:
        return Event(message.event, json.loads(message.data))
    except ValueError as error:
        raise httpx.TransportError(f"cut off in the middle of an event ({error})") from error


def _check_order(event: Event, message: ServerSentEvent, seen: int) -> int:
    """Tokens seen, with this event. The position in ``id`` and in ``data`` must both be the next one."""
    if event.kind != "token":
        return seen
    index, tokens = int(event.data["index"]), len(event.data["token_ids"])
    if index != seen or message.id != str(seen + tokens):
        raise StreamBroken(f"expected token {seen}, got token {index} (event id {message.id!r})", "please report this as a bug")
    return seen + tokens


def _raise_for(response: httpx.Response) -> None:
    if response.is_success:
        return
    response.read()
    raise ClientError(problem_text(response))


def problem_text(response: httpx.Response) -> str:
    """What a problem+json answer says; the bare status when it is something else (a proxy's page)."""
    try:
        problem = response.json()
        if isinstance(problem.get("error"), dict):  # OpenAI's form
            return str(problem["error"]["message"])
        return str(problem.get("detail") or problem.get("title") or problem)
    except (ValueError, AttributeError, KeyError):
        return f"{response.url} answers {response.status_code} {response.reason_phrase}"


def _retry_after(response: httpx.Response) -> float:
    try:
        return float(response.headers.get("Retry-After", "0"))
    except ValueError:
        return 0.0
