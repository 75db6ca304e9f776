"""One client of the HTTP surface, as a careful user would write it; everything it sends and sees goes into the history.

It resends a submission whose reply was lost with the same Idempotency-Key, and reconnects a broken stream with ``Last-Event-ID``.
It never repairs what it sees: judging is for the checkers.
"""

import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from typing import Any

import httpx

from chaos.history import TERMINAL_EVENTS, Call, Event, History, JobSeen, StreamClosed, StreamOpened, now
from chaos.workload import Case

#: Longer than the keep-alive comment of a silent stream (15 s): past this, nobody is there.
STREAM_SILENCE = 25.0
CALL_TIMEOUT = 15.0
_BACKOFF = (0.05, 0.8)  #: first and longest pause between tries, in seconds
_AGAIN = (429, 503)


@dataclass(frozen=True, slots=True)
class SseEvent:
    name: str
    id: str | None
    data: str


def parse_sse(lines: Iterator[str]) -> Iterator[SseEvent]:
    """Events of a stream. Only whole ones: what was cut off has no blank line behind it and is dropped, as the standard says."""
    name, event_id, data = "message", None, list[str]()
    for line in lines:
        if not line:
            if data:
                yield SseEvent(name, event_id, "\n".join(data))
            name, event_id, data = "message", None, []
            continue
        key, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if key == "event":
            name = value
        elif key == "id":
            event_id = value
        elif key == "data":
            data.append(value)


@dataclass(slots=True)
class Backoff:
    rng: Random
    pause: float = _BACKOFF[0]

    def wait(self, halt: threading.Event) -> None:
        halt.wait(self.pause * self.rng.uniform(0.5, 1.0))
        self.pause = min(self.pause * 2, _BACKOFF[1])


class Client:
    """``halt`` ends it at once; what it was doing is recorded as given up."""

    def __init__(self, name: str, url: str, history: History, rng: Random, halt: threading.Event) -> None:
        self.name = name
        self._history = history
        self._rng = rng
        self._halt = halt
        self._submits = 0
        self._http = httpx.Client(base_url=url, timeout=CALL_TIMEOUT, trust_env=False)

    def close(self) -> None:
        self._http.close()

    # --- calls --------------------------------------------------------------------------------------------------------

    def submit(self, case: Case, patience: float, key: str = "") -> str | None:
        """The job's id, after as many tries as it takes. None when refused for good, or not taken within ``patience`` seconds."""
        self._submits += 1
        key = key or f"{self.name}-{self._submits}-{self._rng.randrange(1 << 40):x}"
        backoff, until = Backoff(self._rng), now() + patience
        while now() < until and not self._halt.is_set():
            call = self._call(
                "submit", "POST", "/v1/jobs", json=case.body, headers={"Idempotency-Key": key}, case=case.name, key=key
            )
            if call.status in (200, 202):
                return call.job_id
            if call.status is not None and call.status not in _AGAIN:
                return None
            backoff.wait(self._halt)
        return None

    def get(self, job_id: str) -> Call:
        return self._call("get", "GET", f"/v1/jobs/{job_id}", job_id=job_id)

    def cancel(self, job_id: str, patience: float) -> bool:
        backoff, until = Backoff(self._rng), now() + patience
        while now() < until and not self._halt.is_set():
            call = self._call("cancel", "POST", f"/v1/jobs/{job_id}/cancel", job_id=job_id)
            if call.status is not None and call.status not in _AGAIN:
                return call.status == 200
            backoff.wait(self._halt)
        return False

    def _call(
        self, operation: str, method: str, path: str, *, job_id: str = "", case: str = "", key: str = "", **request: Any
    ) -> Call:
        started = now()
        status, seen, error = None, None, ""
        try:
            answer = self._http.request(method, path, **request)
            status = answer.status_code
            if answer.is_success:
                body = answer.json()
                job_id, seen = str(body["id"]), job_seen(body)
            else:
                error = answer.text[:500]
        except httpx.HTTPError as problem:
            error = repr(problem)
        call = Call(self.name, operation, started, now(), status, job_id, case, key, seen, error)
        self._history.add(call)
        return call

    # --- streams ------------------------------------------------------------------------------------------------------

    def follow(
        self, job_id: str, *, reader: str, cursor: int | None = None, patience: float, cancel_after: int | None = None
    ) -> bool:
        """Read the job's events to the terminal one, over as many connections as it takes. ``patience``: seconds without news."""
        backoff, last_news, attempt = Backoff(self._rng), now(), 0
        while not self._halt.is_set() and now() - last_news < patience:
            attempt += 1
            before = cursor
            how, cursor = self._read(job_id, reader, attempt, cursor, cancel_after)
            if how in ("terminal", "refused"):
                return how == "terminal"
            if cursor != before:
                backoff, last_news = Backoff(self._rng), now()
            backoff.wait(self._halt)
        self._history.add(StreamClosed(reader, job_id, attempt, now(), "gave_up"))
        return False

    def _read(self, job_id: str, reader: str, attempt: int, cursor: int | None, cancel_after: int | None) -> tuple[str, int | None]:
        """One connection: how it closed, and the position after it."""
        headers = {} if cursor is None else {"Last-Event-ID": str(cursor)}
        how, error, opened = "ended", "", False
        timeout = httpx.Timeout(CALL_TIMEOUT, read=STREAM_SILENCE)
        try:
            with self._http.stream("GET", f"/v1/jobs/{job_id}/events", headers=headers, timeout=timeout) as answer:
                opened = True
                self._history.add(StreamOpened(reader, job_id, attempt, now(), cursor, answer.status_code))
                if answer.status_code != 200:
                    how = "terminal" if answer.status_code == 204 else "busy" if answer.status_code in _AGAIN else "refused"
                    error = answer.read().decode(errors="replace")[:500]
                else:
                    for sse in parse_sse(answer.iter_lines()):
                        event = self._record(reader, job_id, attempt, sse)
                        cursor = event.id if event.id is not None else cursor
                        if event.name in TERMINAL_EVENTS:
                            how = "terminal"
                            break
                        if self._halt.is_set():
                            break
                        if cancel_after is not None and cursor is not None and cursor >= cancel_after:
                            cancel_after = None
                            self.cancel(job_id, CALL_TIMEOUT)
        except httpx.ReadTimeout as problem:
            how, error = "silent", repr(problem)
        except httpx.HTTPError as problem:
            how, error = "broken", repr(problem)
        if not opened:
            self._history.add(StreamOpened(reader, job_id, attempt, now(), cursor, None))
        self._history.add(StreamClosed(reader, job_id, attempt, now(), how, error))
        return how, cursor

    def _record(self, reader: str, job_id: str, attempt: int, sse: SseEvent) -> Event:
        data: dict[str, Any] = json.loads(sse.data)
        event = Event(
            reader=reader,
            job_id=job_id,
            attempt=attempt,
            at=now(),
            name=sse.name,
            id=None if sse.id is None else int(sse.id),
            index=data.get("index"),
            token_ids=tuple(data.get("token_ids", ())),
            text=str(data.get("text", "")),
        )
        self._history.add(event)
        return event


def job_seen(body: dict[str, Any]) -> JobSeen:
    output, recovery, error = body.get("output") or {}, body.get("recovery") or {}, body.get("error")
    return JobSeen(
        status=str(body["status"]),
        token_ids=tuple(output.get("token_ids", ())),
        text=str(output.get("text", "")),
        finish_reason=str(output.get("finish_reason") or ""),
        error="" if error is None else str(error.get("code", error)),
        recoveries=int(recovery.get("count", 0)),
        tokens_replayed=int(recovery.get("tokens_replayed", 0)),
        pages_restored=int(recovery.get("pages_restored", 0)),
    )
