"""The lines of an input file: read from the store piece by piece, and each made into the jobs it asks for."""

from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from typing import Any

from service.api import submission
from service.api.context import Context
from service.api.openai.batch_requests import BatchLine
from service.api.openai.surface import Surface
from service.api.problems import ApiError, InvalidRequest, problem_of
from service.api.schemas import parse_json, validate
from storage.batch_records import CHUNK, BatchRecord, FileRecord
from storage.job_spec import JobSpec
from storage.records import NewJob

#: Behind what may be submitted by hand: a batch has a day, whoever waits for an answer has not.
BATCH_PRIORITY = -10
#: Under which a job's spec keeps what its line is called.
CUSTOM_ID = "custom_id"


class FileGone(Exception):
    """The file was deleted while it was read."""


@dataclass(frozen=True, slots=True)
class Line:
    number: int  #: from 1
    end: int  #: where the next line begins, in bytes from the file's beginning
    content: bytes | None  #: None: longer than a request may be


async def read_lines(context: Context, file: FileRecord, number: int = 1, position: int = 0) -> AsyncIterator[Line]:
    """The lines from this one on, which begins at ``position``; what follows the last newline is one if there is anything.

    Holds a chunk and a line at most. Raises FileGone and what ``storage.errors`` names.
    """
    limit = context.options.max_body_bytes
    kept, length = bytearray(), 0
    async for piece in read_chunks(context, file, position):
        *ended, last = piece.split(b"\n")
        for part in ended:
            kept += part if length <= limit else b""
            length += len(part)
            position += length + 1
            yield Line(number, position, bytes(kept) if length <= limit else None)
            number, length = number + 1, 0
            kept.clear()
        kept += last if length <= limit else b""
        length += len(last)
    if length:
        yield Line(number, position + length, bytes(kept) if length <= limit else None)


async def read_chunks(context: Context, file: FileRecord, position: int = 0) -> AsyncIterator[bytes]:
    """The file's bytes from ``position`` on. Raises FileGone and what ``storage.errors`` names."""
    for number in range(position // CHUNK, file.chunks):
        content = await context.store.run(lambda store, number=number: store.batches.chunk(file, number))  # type: ignore[misc]
        if content is None:
            raise FileGone
        yield content[max(0, position - number * CHUNK) :]


class LineRefused(Exception):
    """A line that is no request to the batch's endpoint, in OpenAI's words for it."""

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.param = param


def parse_line(line: Line, endpoint: str) -> BatchLine:
    """Raises LineRefused."""
    if line.content is None:
        raise LineRefused("line_too_long", "the line is longer than a request may be (--max-body-bytes)")
    try:
        asked = validate(BatchLine, parse_json(line.content))
    except InvalidRequest as error:
        code = "invalid_json_line" if error.code == "invalid_json" else error.code or problem_of(error).code
        raise LineRefused(code, error.message, error.param) from None
    if asked.url != endpoint:
        raise LineRefused("mismatched_url", f"url: the batch is for {endpoint}, not for {asked.url[:80]!r}", "url")
    if asked.body.get("stream"):
        raise LineRefused("unsupported_value", "body.stream: a line has no stream; leave it out", "body.stream")
    return asked


async def jobs_of_line(surface: Surface, batch: BatchRecord, line: int, asked: BatchLine) -> tuple[NewJob, ...]:
    """The line's group. Raises LineRefused and what ``storage.errors`` names."""
    try:
        jobs = await surface.jobs(asked.body, _origin(batch, line), batch.line_id(line))
    except ApiError as error:
        param = f"body.{error.param}" if error.param else "body"
        raise LineRefused(error.code or problem_of(error).code, f"body: {error.message}", param) from None
    shared: dict[str, Any] = {"batch": batch.batch_id, "choices": len(jobs), "priority": BATCH_PRIORITY}
    return tuple(replace(job, spec=_named(job.spec, asked.custom_id), **shared) for job in jobs)


def job_of_refused_line(context: Context, batch: BatchRecord, line: int, custom_id: str) -> NewJob:
    """What stands for a line of which no job can be made any more, as when the engines have changed since it was validated."""
    spec = JobSpec(model=context.model.name, max_tokens=1, seed=0, kind="batch", request={CUSTOM_ID: custom_id})
    origin = _origin(batch, line)
    return NewJob(
        job_id=batch.line_id(line),
        spec=spec.to_json(),
        prompt_token_ids=(),
        model_fingerprint=context.model.fingerprint,
        max_tokens=1,
        request_hash="",
        priority=BATCH_PRIORITY,
        tenant=batch.tenant,
        request_id=origin.request_id,
        traceparent=origin.traceparent,
        batch=batch.batch_id,
    )


def request_id(batch: BatchRecord, line: int) -> str:
    return f"{batch.batch_id.replace('batch_', 'batch_req_', 1)}-{line}"


def _origin(batch: BatchRecord, line: int) -> submission.Origin:
    return submission.Origin(batch.tenant, batch.endpoint, request_id(batch, line), batch.traceparent, None)


def _named(spec: str, custom_id: str) -> str:
    known = JobSpec.from_json(spec)
    return replace(known, request={**known.request, CUSTOM_ID: custom_id}).to_json()
