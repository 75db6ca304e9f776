"""``POST /v1/completions``: OpenAI's legacy shape, as a thin layer on the same jobs.

A plain completion belongs to its HTTP request: its job names this api process, and when the client goes away it is cancelled.
With an Idempotency-Key the client has said that it may come back: the job goes on, and the same request gets the same answer.
"""

import asyncio
import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from service.api import logprobs, submission, views
from service.api.context import Context
from service.api.edge import read_body
from service.api.problems import ApiError, Draining, JobCancelled, JobFailed, JobNotFound, openai_body
from service.api.reader import JobGone, JobReader, Progress, ReaderStopped, follow
from service.api.schemas import CompletionRequest, parse_json, validate
from service.api.streams import EventStream, watch_client
from service.api.tailer import Tailer
from service.logs import get_logger
from storage.errors import StorageError, StoreUnavailable
from storage.records import JobRecord, JobStatus, LogEntry, NewJob

COMPLETION_PREFIX = "cmpl-"
_CANCEL_FOR = 60.0  #: seconds of trying to cancel the job of a client that went away
_log = get_logger("api.completions")


def completion_routes(context: Context, tailer: Tailer) -> APIRouter:
    router = APIRouter(tags=["openai"])
    body = {"required": True, "content": {"application/json": {"schema": CompletionRequest.model_json_schema()}}}
    canceller = Canceller(context)

    @router.post("/v1/completions", openapi_extra={"requestBody": body})
    async def create(request: Request) -> Response:
        """OpenAI's Completions, with vLLM's top_k, min_p, repetition_penalty, min_tokens and ignore_eos."""
        asked, job, replayed = await _submit(context, canceller, request)
        plain = canceller if job.served_by else None
        shape = CompletionShape(context, logprobs_asked=asked.logprobs is not None)
        response: Response
        if asked.stream:
            usage = asked.stream_options is not None and asked.stream_options.include_usage
            response = EventStream(context, tailer, job.job_id, 0, CompletionEvents(shape, usage, plain))
        else:
            response = WholeCompletion(context, tailer, job.job_id, shape, plain)
        if replayed:
            response.headers["Idempotent-Replayed"] = "true"
        return response

    return router


async def _submit(context: Context, canceller: "Canceller", request: Request) -> tuple[CompletionRequest, NewJob, bool]:
    """(the request, its job with the id that it has in the store, whether that is an earlier request's job)"""
    origin = submission.Origin.of(request)
    body = parse_json(await read_body(request, context.options.max_body_bytes))
    asked = validate(CompletionRequest, body)
    submission.check_model(context, asked.model)
    tokens, field = await submission.prompt_tokens(context, asked)
    max_tokens = submission.fit(context, len(tokens), asked.max_tokens, field)
    spec = submission.make_spec(context, asked, max_tokens, metadata={}, kind="completion")
    job = NewJob(
        job_id=submission.new_job_id(COMPLETION_PREFIX),
        spec=spec.to_json(),
        prompt_token_ids=tokens,
        model_fingerprint=context.model.fingerprint,
        max_tokens=max_tokens,
        request_hash=submission.request_hash(body, origin.path),
        idempotency_key=origin.idempotency_key,
        request_id=origin.request_id,
        traceparent=origin.traceparent,
        served_by="" if origin.idempotency_key else context.incarnation,
    )
    try:
        answer = await submission.submit(context, job)
    except StoreUnavailable:
        if job.served_by:  # the job may be there all the same, and its client will not hear of it
            canceller.cancel(job.job_id)
        raise
    replayed = submission.is_replay(job, answer)
    return asked, dataclasses.replace(job, job_id=answer.job_id), replayed


class Canceller:
    """Cancels the jobs of clients that went away; tries for a while, for the store may be away just then."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._tasks: set[asyncio.Task[None]] = set()

    def cancel(self, job_id: str) -> None:
        task = asyncio.create_task(self._cancel(job_id))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _cancel(self, job_id: str) -> None:
        loop = asyncio.get_running_loop()
        give_up = loop.time() + _CANCEL_FOR
        while loop.time() < give_up:
            try:
                await self._context.store.run(lambda store: store.cancel(job_id))
            except StorageError:
                await asyncio.sleep(1.0)
            else:
                _log.info("cancelled_with_its_client", job_id=job_id)
                return


class CompletionShape:
    """How OpenAI's clients see a job."""

    def __init__(self, context: Context, *, logprobs_asked: bool) -> None:
        self.context = context
        self._logprobs_asked = logprobs_asked

    def choice(self, text: str, entries: Sequence[LogEntry], text_before: int, finish_reason: str | None) -> dict[str, Any]:
        shown = None
        if self._logprobs_asked and entries:
            shown = logprobs.legacy(entries, text_before, self.context.model.tokenization)
        return {"index": 0, "text": text, "logprobs": shown, "finish_reason": finish_reason}

    def body(self, record: JobRecord, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": record.job_id,
            "object": "text_completion",
            "created": int(record.created_at),
            "model": self.context.model.name,
            "choices": choices,
        }


def openai_usage(record: JobRecord) -> dict[str, Any]:
    counted: dict[str, Any] = views.usage(record)
    return {**counted, "prompt_tokens_details": {"cached_tokens": counted.pop("cached_tokens")}}


def _ending_error(record: JobRecord) -> ApiError | None:
    if record.status is JobStatus.FAILED:
        error = record.error
        return JobFailed(error.message if error else "the job failed", code=error.code if error else None)
    if record.status is JobStatus.CANCELLED:
        return JobCancelled("this completion was cancelled")
    return None


class CompletionEvents:
    """Renderer of a streamed completion: one chunk for each token that shows text, then the reason of its end, then ``[DONE]``.

    Keep-alive is one newline: a comment and a blank line would be an empty event to the SDK.
    """

    keep_alive = b": ping\n"

    def __init__(self, shape: CompletionShape, include_usage: bool, canceller: Canceller | None) -> None:
        self._shape = shape
        self._include_usage = include_usage
        self._canceller = canceller
        self._text_length = 0

    def open(self, reader: JobReader) -> Response | None:
        return None

    def render(self, progress: Progress) -> bytes:
        chunks: list[str] = []
        for entry in progress.entries:
            choice = self._shape.choice(entry.text, [entry], self._text_length, None)
            self._text_length += len(entry.text)
            if entry.text or choice["logprobs"]:
                chunks.append(self._chunk(progress.record, [choice]))
        if progress.finished:
            chunks += self._end(progress.record)
        return "".join(chunks).encode()

    def _end(self, record: JobRecord) -> list[str]:
        error = _ending_error(record)
        if error is not None:
            return [_data(openai_body(error)), "data: [DONE]\n\n"]
        chunks = [self._chunk(record, [self._shape.choice("", [], self._text_length, record.finish_reason)])]
        if self._include_usage:
            chunks.append(_data({**self._shape.body(record, []), "usage": openai_usage(record)}))
        return [*chunks, "data: [DONE]\n\n"]

    def _chunk(self, record: JobRecord, choices: list[dict[str, Any]]) -> str:
        body = self._shape.body(record, choices)
        return _data({**body, "usage": None} if self._include_usage else body)

    def gone(self) -> bytes:
        return _data(openai_body(JobNotFound("the job was deleted while it was read", code="gone"))).encode()

    def left_early(self, job_id: str) -> None:
        if self._canceller is not None:
            self._canceller.cancel(job_id)


class WholeCompletion(Response):
    """Waits for the job's end, then answers. A store that is away is a pause here, too."""

    def __init__(self, context: Context, tailer: Tailer, job_id: str, shape: CompletionShape, canceller: Canceller | None) -> None:
        super().__init__()
        self._context = context
        self._tailer = tailer
        self._job_id = job_id
        self._shape = shape
        self._canceller = canceller

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        done = False
        try:
            async with follow(self._context, self._tailer, self._job_id, 0) as reader:
                watcher = asyncio.create_task(watch_client(receive, reader))
                try:
                    entries = await self._collect(reader)
                finally:
                    watcher.cancel()
                record, done = reader.record, True
        except JobGone:
            done = True
            raise JobNotFound("the job was deleted while it was read", code="gone") from None
        except ReaderStopped:
            if self._context.drain.draining:
                raise Draining("this server is about to end: try again") from None
            return  # the client is gone: nobody to answer
        finally:
            if not done and self._canceller is not None:
                self._canceller.cancel(self._job_id)
        error = _ending_error(record)
        if error is not None:
            raise error
        await self._answer(record, entries)(scope, receive, send)

    async def _collect(self, reader: JobReader) -> list[LogEntry]:
        entries: list[LogEntry] = []
        while True:
            progress = await reader.next(self._context.options.keep_alive)
            if progress is not None:
                entries += progress.entries
                if progress.finished:
                    return entries

    def _answer(self, record: JobRecord, entries: list[LogEntry]) -> Response:
        choice = self._shape.choice("".join(entry.text for entry in entries), entries, 0, record.finish_reason)
        body = {**self._shape.body(record, [choice]), "usage": openai_usage(record)}
        replayed = self.headers.get("Idempotent-Replayed")
        return JSONResponse(body, headers={"Idempotent-Replayed": replayed} if replayed else None)


def _data(value: dict[str, Any]) -> str:
    return f"data: {json.dumps(value, ensure_ascii=False, separators=(',', ':'))}\n\n"
