"""What Completions and Chat Completions share: one choice for each job of a group, whole and streamed.

An answer ends with the last of its jobs, or with the first that fails: a part of the choices is no answer.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from starlette.responses import Response

from service.api.openai.surface import GONE, Output, RequestJobs
from service.api.problems import TABLE, ApiError, DeadlineExceeded, JobCancelled, JobFailed, JobNotFound, openai_body
from service.api.reader import Progress
from storage.records import JobRecord, JobStatus, LogEntry

_DONE = "data: [DONE]\n\n"
Json = dict[str, Any]


class StreamedChoice(Protocol):
    """One choice, told in pieces: each is the ``choices`` entry of a chunk. A function of what is stored of the job alone."""

    def begin(self) -> list[Json]: ...

    def add(self, entry: LogEntry) -> list[Json]: ...

    def end(self, record: JobRecord) -> list[Json]: ...


class Shape(Protocol):
    """How an endpoint's answers look. ``answer_id``: the first job's."""

    def choice(self, index: int, record: JobRecord) -> StreamedChoice: ...

    def chunk(self, answer_id: str, record: JobRecord, choices: list[Json]) -> Json: ...

    def usage(self, records: Sequence[JobRecord], choices: Sequence[Any]) -> Json:
        """``choices``: as they were told, in the order of ``records``."""


def openai_usage(*prompts: Sequence[JobRecord]) -> Json:
    """``prompts``: the jobs of each, which counts once; of its tokens those are cached that no job had to compute."""
    prompt = sum(len(records[0].prompt_token_ids) for records in prompts)
    completion = sum(record.log_length for records in prompts for record in records)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(min(record.cached_tokens for record in records) for records in prompts)},
    }


def check_endings(outputs: Sequence[Output]) -> None:
    """Raises JobFailed or JobCancelled for the first job that ended so."""
    for output in outputs:
        if (error := _ending_error(output.record)) is not None:
            raise error


def _ending_error(record: JobRecord) -> ApiError | None:
    if record.status is JobStatus.FAILED:
        error = record.error
        if error is not None and error.code == TABLE[DeadlineExceeded].code:
            return DeadlineExceeded(error.message, param="deadline_seconds")
        return JobFailed(error.message if error else "the job failed", code=error.code if error else None)
    if record.status is JobStatus.CANCELLED:
        return JobCancelled("this completion was cancelled")
    return None


def wants_usage(body: Mapping[str, Any]) -> bool:
    return bool((body.get("stream_options") or {}).get("include_usage"))


class ChoiceEvents:
    """Renderer of a streamed answer: chunks as the choices tell them, then ``[DONE]``.

    Keep-alive is one newline: a comment and a blank line would be an empty event to the SDK.
    """

    keep_alive = b": ping\n"

    def __init__(self, shape: Shape, jobs: RequestJobs, *, include_usage: bool) -> None:
        self.ended = False
        self._shape = shape
        self._jobs = jobs
        self._include_usage = include_usage
        self._choices: dict[str, StreamedChoice] = {}
        self._finished: dict[str, JobRecord] = {}

    def open(self, record: JobRecord) -> Response | None:
        return None

    def render(self, progress: Progress) -> bytes:
        record, pieces = progress.record, list[Json]()
        choice = self._choices.get(record.job_id)
        if choice is None:
            choice = self._choices[record.job_id] = self._shape.choice(self._jobs.ids.index(record.job_id), record)
            pieces += choice.begin()
        for entry in progress.entries:
            pieces += choice.add(entry)
        failed = _ending_error(record) if progress.finished else None
        if progress.finished and failed is None:
            pieces += choice.end(record)
        chunks = [self._chunk(record, [piece]) for piece in pieces]
        if progress.finished:
            chunks += self._end(record, failed)
        return "".join(chunks).encode()

    def _end(self, record: JobRecord, failed: ApiError | None) -> list[str]:
        self._finished[record.job_id] = record
        self.ended = failed is not None or len(self._finished) == len(self._jobs.ids)
        if failed is not None:
            return [_data(openai_body(failed)), _DONE]
        chunks: list[str] = []
        if self.ended and self._include_usage:
            usage = self._shape.usage(*zip(*((self._finished[i], self._choices[i]) for i in self._jobs.ids), strict=True))
            chunks.append(_data({**self._shape.chunk(self._jobs.ids[0], record, []), "usage": usage}))
        return [*chunks, _DONE] if self.ended else chunks

    def _chunk(self, record: JobRecord, choices: list[Json]) -> str:
        chunk = self._shape.chunk(self._jobs.ids[0], record, choices)
        return _data({**chunk, "usage": None} if self._include_usage else chunk)

    def gone(self) -> bytes:
        return _data(openai_body(JobNotFound(GONE, code="gone"))).encode()

    def close(self) -> None:
        self._jobs.over(self._finished)


def _data(value: Json) -> str:
    return f"data: {json.dumps(value, ensure_ascii=False, separators=(',', ':'))}\n\n"
