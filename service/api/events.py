"""The native event stream (PROTOCOL.md 11): ``GET /v1/jobs/{id}/events``.

``id:`` is the number of tokens seen: a client resumes by sending it back. Events that tell of no token carry none. The terminal
event has id = tokens + 1, and a request with that id is answered 204, which is how EventSource is told not to come back.
"""

import json
import re
from typing import Any

from starlette.responses import Response

from service.api import views
from service.api.context import Context
from service.api.problems import CursorAhead, InvalidRequest
from service.api.reader import Progress
from service.api.recoveries import RecoveryWatch
from storage.records import JobRecord, JobStatus

_quoted = json.JSONEncoder(ensure_ascii=False).encode  # json.dumps would make an encoder for each token
_CURSOR = re.compile(r"[0-9]{1,15}")
_TERMINAL_EVENT = {
    JobStatus.COMPLETED: "done",
    JobStatus.INCOMPLETE: "done",
    JobStatus.FAILED: "failed",
    JobStatus.CANCELLED: "cancelled",
}


def parse_cursor(last_event_id: str | None, after: str | None) -> tuple[int, str]:
    """(tokens seen, the parameter that said so). The header wins: a browser that reconnects sends it with the first URL."""
    text, name = (last_event_id, "Last-Event-ID") if last_event_id is not None else (after, "after")
    if text is None:
        return 0, name
    if not _CURSOR.fullmatch(text):
        raise InvalidRequest(f"{name}: must be the number of tokens seen (the last id)", param=name, code="invalid_cursor")
    return int(text), name


class NativeEvents:
    """Renderer of one stream. ``after``: the cursor as the client sent it; ``param``: where."""

    keep_alive = b": ping\n\n"

    def __init__(self, context: Context, after: int, param: str) -> None:
        self._context = context
        self._after = after
        self._param = param
        self.ended = False
        self._shown_status: JobStatus | None = None
        self._recoveries = RecoveryWatch()

    def open(self, record: JobRecord) -> Response | None:
        if record.status.terminal and self._after == record.log_length + 1:
            return Response(status_code=204)
        if self._after > record.log_length:
            raise CursorAhead(
                f"{self._param}: position {self._after} is ahead of the log, which has {record.log_length} tokens: the "
                "store does not hold what you saw (was an older copy of its directory put back?); start again from 0",
                param=self._param,
            )
        if self._after:
            self._context.metrics.stream_resumes.inc()
        self._recoveries.begin(record)
        return None

    def render(self, progress: Progress) -> bytes:
        record = progress.record
        events: list[str] = []
        if record.status != self._shown_status and not record.status.terminal:
            events.append(_event(record.status.value, {"id": record.job_id, "status": record.status.value}))
            self._shown_status = record.status
        if self._recoveries.is_news(record):
            events.append(_event("recovered", views.recovery(record)))
        index = progress.after
        for entry in progress.entries:
            text = _quoted(entry.text)
            data = f'{{"index":{index},"token_ids":[{entry.token}],"text":{text}}}'
            index += 1
            events.append(f"id: {index}\nevent: token\ndata: {data}\n\n")
        if progress.finished:
            events.append(_event(_TERMINAL_EVENT[record.status], _ending(record), event_id=record.log_length + 1))
            self.ended = True
        return "".join(events).encode()

    def gone(self) -> bytes:
        error = {"code": "gone", "message": "the job was deleted while it was read"}
        return _event("failed", {"status": "failed", "finish_reason": None, "usage": None, "error": error}).encode()

    def close(self) -> None:
        """The job goes on; the client may come back."""


def _ending(record: JobRecord) -> dict[str, Any]:
    return {
        "status": record.status.value,
        "finish_reason": record.finish_reason or None,
        "usage": views.usage(record),
        "error": views.error(record),
    }


def _event(name: str, data: dict[str, Any], event_id: int | None = None) -> str:
    identified = f"id: {event_id}\n" if event_id is not None else ""
    return f"{identified}event: {name}\ndata: {json.dumps(data, ensure_ascii=False, separators=(',', ':'))}\n\n"
