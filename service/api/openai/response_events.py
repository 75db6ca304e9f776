"""The event stream of a response. Its events and their numbers are a pure function of the token log and of fields that never
change: so a client goes on behind the last number that it saw, at any api, whatever died in between.

    0 created, 1 queued, 2 in_progress
    3 output_item.added, 4 content_part.added
    5.. one output_text.delta for each token that shows text
    .. output_text.done, content_part.done, output_item.done, then completed, incomplete or failed

So it is with an answer that can be nothing but a message. With tools, or a model that reasons, each item comes when its part of
the text begins, and in a message's place may be reasoning (reasoning_text.delta, .done) or a call (function_call_arguments.delta,
.done), which has no content part.

The head is told as it comes to pass, but its snapshots say what was known at its time and not what is known at that of the reader.
OpenAI has no event for a cancelled response. A stream without a terminal event is one to be resumed, so ours ends in
``response.failed``, whose response has the status ``cancelled``.

No recovery has a number: it shows as a comment. No line is an ``id:``, behind which OpenAI's SDK takes a comment for an event.
"""

import json
from collections.abc import Sequence
from typing import Any

from starlette.responses import Response

from service.api import views
from service.api.context import Context
from service.api.openai.response_answers import ResponseShape
from service.api.openai.response_output import Event, ResponseOutput
from service.api.openai.surface import GONE, RequestJobs
from service.api.reader import Progress
from service.api.recoveries import RecoveryWatch
from storage.records import JobRecord, JobStatus, LogEntry

HEAD, TAIL = 5, 4  #: of one message: events before the first delta, and behind the last
_TOLD_AT_ONCE = 2  #: events that are true of every response
_TERMINAL_EVENT = {
    JobStatus.COMPLETED: "response.completed",
    JobStatus.INCOMPLETE: "response.incomplete",
    JobStatus.FAILED: "response.failed",
    JobStatus.CANCELLED: "response.failed",
}


def last_number(shape: ResponseShape, record: JobRecord, entries: Sequence[LogEntry]) -> int:
    """Of the newest event that a client can have seen. The head may be told before it is stored that the job has begun."""
    output = shape.output(record)
    told = len(output.begin()) + sum(len(output.add(entry)) for entry in entries)
    told += len(output.end(record.status)) + 1 if record.status.terminal else 0
    return _TOLD_AT_ONCE + told


class ResponseEvents:
    """Renderer of one stream. ``after``: the number of the last event that the client saw, or None."""

    keep_alive = b": ping\n"

    def __init__(self, context: Context, shape: ResponseShape, jobs: RequestJobs, after: int | None = None) -> None:
        self.ended = False
        self._context = context
        self._shape = shape
        self._jobs = jobs
        self._after = -1 if after is None else after
        self._number = 0  #: of the next event
        self._output: ResponseOutput | None = None  #: None: not yet begun
        self._recoveries = RecoveryWatch()

    def open(self, record: JobRecord) -> Response | None:
        self._jobs.heard()
        self._recoveries.begin(record)
        if self._after >= 0:
            self._context.metrics.stream_resumes.inc()
        return None

    def render(self, progress: Progress) -> bytes:
        record, said = progress.record, []
        if self._number == 0:
            said += self._announce(record)
        if self._recoveries.is_news(record):
            said.append(f": recovered {json.dumps(views.recovery(record))}\n")
        if self._output is None and (record.started_at is not None or record.status.terminal):
            said += self._begin(record)
        if self._output is not None:
            said += [event for entry in progress.entries for event in self._numbered(self._output.add(entry))]
        if self._output is not None and progress.finished:
            said += self._end(record, self._output)
        return "".join(said).encode()

    def _announce(self, record: JobRecord) -> list[str]:
        queued = self._shape.opening(record, JobStatus.QUEUED)
        return [self._event("response.created", response=queued), self._event("response.queued", response=queued)]

    def _begin(self, record: JobRecord) -> list[str]:
        self._output = self._shape.output(record)
        begun = self._event("response.in_progress", response=self._shape.opening(record, JobStatus.IN_PROGRESS))
        return [begun, *self._numbered(self._output.begin())]

    def _end(self, record: JobRecord, output: ResponseOutput) -> list[str]:
        self.ended = True
        told = self._numbered(output.end(record.status))
        return [*told, self._event(_TERMINAL_EVENT[record.status], response=self._shape.told(record, output))]

    def _numbered(self, events: Sequence[Event]) -> list[str]:
        return [self._event(kind, **fields) for kind, fields in events]

    def _event(self, kind: str, **fields: Any) -> str:
        number = self._number
        self._number += 1
        if number <= self._after:
            return ""
        data = json.dumps({"type": kind, "sequence_number": number, **fields}, ensure_ascii=False, separators=(",", ":"))
        return f"event: {kind}\ndata: {data}\n\n"

    def gone(self) -> bytes:
        self._number = max(self._number, self._after + 1)
        return self._event("error", code="gone", message=GONE, param=None).encode()

    def close(self) -> None:
        self._jobs.over(self._jobs.ids if self.ended else ())
