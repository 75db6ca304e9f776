"""Completions as OpenAI's clients see them, whole and streamed: one choice for each job of a group.

An answer ends with the last of its jobs, or with the first that fails: a part of the choices is no answer.
"""

import asyncio
import json
from collections.abc import Collection, Sequence
from typing import Any

from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from service.api import logprobs
from service.api.canceller import Canceller
from service.api.context import Context
from service.api.problems import ApiError, Draining, JobCancelled, JobFailed, JobNotFound, openai_body
from service.api.reader import GroupReader, JobGone, Progress, ReaderStopped, follow
from service.api.streams import watch_client
from service.api.tailer import Tailer
from storage.records import JobRecord, JobStatus, LogEntry

_DONE = "data: [DONE]\n\n"
_GONE = "the job was deleted while it was read"


class CompletionShape:
    """How OpenAI's clients see the jobs of one request. ``job_ids``: by the index of their choices; the first names the answer.

    ``canceller``: of a plain completion, whose jobs end with the request.
    """

    def __init__(self, context: Context, job_ids: Sequence[str], canceller: Canceller | None, *, logprobs_asked: bool) -> None:
        self._context = context
        self.job_ids = tuple(job_ids)
        self._canceller = canceller
        self._logprobs_asked = logprobs_asked

    def choice(
        self, record: JobRecord, text: str, entries: Sequence[LogEntry], text_before: int, finish_reason: str | None
    ) -> dict[str, Any]:
        shown = None
        if self._logprobs_asked and entries:
            shown = logprobs.legacy(entries, text_before, self._context.model.tokenization)
        return {"index": self.job_ids.index(record.job_id), "text": text, "logprobs": shown, "finish_reason": finish_reason}

    def body(self, record: JobRecord, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.job_ids[0],
            "object": "text_completion",
            "created": int(record.created_at),
            "model": self._context.model.name,
            "choices": choices,
        }

    def cancel_all_but(self, ended: Collection[str]) -> None:
        """The request is over; its jobs are too, unless they outlive it."""
        if self._canceller is not None:
            for job_id in self.job_ids:
                if job_id not in ended:
                    self._canceller.cancel(job_id)


def openai_usage(records: Sequence[JobRecord]) -> dict[str, Any]:
    """The one prompt counts once; of its tokens those are cached that no job had to compute."""
    prompt = len(records[0].prompt_token_ids)
    completion = sum(record.log_length for record in records)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": min(record.cached_tokens for record in records)},
    }


def _ending_error(record: JobRecord) -> ApiError | None:
    if record.status is JobStatus.FAILED:
        error = record.error
        return JobFailed(error.message if error else "the job failed", code=error.code if error else None)
    if record.status is JobStatus.CANCELLED:
        return JobCancelled("this completion was cancelled")
    return None


class CompletionEvents:
    """Renderer of a streamed completion: a chunk for each token that shows text, one for each choice's end, then ``[DONE]``.

    Keep-alive is one newline: a comment and a blank line would be an empty event to the SDK.
    """

    keep_alive = b": ping\n"

    def __init__(self, shape: CompletionShape, include_usage: bool) -> None:
        self.ended = False
        self._shape = shape
        self._include_usage = include_usage
        self._text_lengths = dict.fromkeys(shape.job_ids, 0)
        self._finished: dict[str, JobRecord] = {}

    def open(self, record: JobRecord) -> Response | None:
        return None

    def render(self, progress: Progress) -> bytes:
        record = progress.record
        chunks: list[str] = []
        for entry in progress.entries:
            choice = self._shape.choice(record, entry.text, [entry], self._text_lengths[record.job_id], None)
            self._text_lengths[record.job_id] += len(entry.text)
            if entry.text or choice["logprobs"]:
                chunks.append(self._chunk(record, [choice]))
        if progress.finished:
            chunks += self._end(record)
        return "".join(chunks).encode()

    def _end(self, record: JobRecord) -> list[str]:
        self._finished[record.job_id] = record
        error = _ending_error(record)
        self.ended = error is not None or len(self._finished) == len(self._shape.job_ids)
        if error is not None:
            return [_data(openai_body(error)), _DONE]
        chunks = [self._chunk(record, [self._shape.choice(record, "", [], 0, record.finish_reason)])]
        if self.ended and self._include_usage:
            chunks.append(_data({**self._shape.body(record, []), "usage": openai_usage(list(self._finished.values()))}))
        return [*chunks, _DONE] if self.ended else chunks

    def _chunk(self, record: JobRecord, choices: list[dict[str, Any]]) -> str:
        body = self._shape.body(record, choices)
        return _data({**body, "usage": None} if self._include_usage else body)

    def gone(self) -> bytes:
        return _data(openai_body(JobNotFound(_GONE, code="gone"))).encode()

    def close(self) -> None:
        self._shape.cancel_all_but(self._finished)


class WholeCompletion(Response):
    """Waits for the end of all jobs, then answers. A store that is away is a pause here, too."""

    def __init__(self, context: Context, tailer: Tailer, shape: CompletionShape) -> None:
        super().__init__()
        self._context = context
        self._tailer = tailer
        self._shape = shape
        self._entries: dict[str, list[LogEntry]] = {job_id: [] for job_id in shape.job_ids}
        self._finished: dict[str, JobRecord] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with follow(self._context, self._tailer, self._shape.job_ids) as reader:
                watcher = asyncio.create_task(watch_client(receive, reader))
                try:
                    await self._collect(reader)
                finally:
                    watcher.cancel()
        except JobGone:
            raise JobNotFound(_GONE, code="gone") from None
        except ReaderStopped:
            if self._context.drain.draining:
                raise Draining("this server is about to end: try again") from None
            return  # the client is gone: nobody to answer
        finally:
            self._shape.cancel_all_but(self._finished)
        await self._answer()(scope, receive, send)

    async def _collect(self, reader: GroupReader) -> None:
        """Raises JobFailed or JobCancelled for the first job that ends so."""
        while len(self._finished) < len(self._entries):
            progress = await reader.next(self._context.options.keep_alive)
            if progress is None:
                continue
            record = progress.record
            self._entries[record.job_id] += progress.entries
            if progress.finished:
                self._finished[record.job_id] = record
                error = _ending_error(record)
                if error is not None:
                    raise error

    def _answer(self) -> Response:
        choices = [self._choice(self._finished[job_id], entries) for job_id, entries in self._entries.items()]
        body = self._shape.body(self._finished[self._shape.job_ids[0]], choices)
        replayed = self.headers.get("Idempotent-Replayed")
        return JSONResponse(
            {**body, "usage": openai_usage(list(self._finished.values()))},
            headers={"Idempotent-Replayed": replayed} if replayed else None,
        )

    def _choice(self, record: JobRecord, entries: list[LogEntry]) -> dict[str, Any]:
        text = "".join(entry.text for entry in entries)
        return self._shape.choice(record, text, entries, 0, record.finish_reason)


def _data(value: dict[str, Any]) -> str:
    return f"data: {json.dumps(value, ensure_ascii=False, separators=(',', ':'))}\n\n"
