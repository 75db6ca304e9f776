"""What OpenAI's endpoints share: from a request to its jobs, and from what these made to an answer, whole or streamed."""

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from service.api import submission
from service.api.context import Context
from service.api.edge import read_body
from service.api.openai.canceller import Canceller
from service.api.problems import Draining, JobNotFound
from service.api.reader import GroupReader, JobGone, ReaderStopped, follow
from service.api.schemas import parse_json
from service.api.streams import EventStream, Renderer, watch_client
from service.api.tailer import Tailer
from storage.errors import StoreUnavailable
from storage.records import JobRecord, JobStatus, LogEntry, NewJob

GONE = "the job was deleted while it was read"
_FAILED = (JobStatus.FAILED, JobStatus.CANCELLED)


@dataclass(frozen=True, slots=True)
class Output:
    """What one job made: ``entries`` are all its tokens."""

    record: JobRecord
    entries: tuple[LogEntry, ...]

    @property
    def text(self) -> str:
        return "".join(entry.text for entry in self.entries)


class Surface(Protocol):
    """An endpoint that makes jobs. The first job of a request names its answer."""

    path: str
    prefix: str  #: of the ids of its jobs

    async def jobs(self, body: Mapping[str, Any], origin: submission.Origin, job_id: str | None = None) -> tuple[NewJob, ...]:
        """The jobs that ``body`` asks for, not yet submitted. ``job_id``: instead of a random one. Raises ApiError."""

    def answer(self, outputs: Sequence[Output]) -> dict[str, Any]:
        """The body for a request's jobs that ended, by what is stored of them alone.

        Raises JobFailed and JobCancelled where that is no answer: then ``outputs`` may hold only the jobs that ended before.
        """

    def events(self, jobs: "RequestJobs", body: Mapping[str, Any]) -> Renderer:
        """The same as a stream."""


class RequestJobs:
    """The jobs of one request, by the index of their choices. With a ``canceller`` they end with the request."""

    def __init__(self, job_ids: Sequence[str], canceller: Canceller | None) -> None:
        self.ids = tuple(job_ids)
        self._canceller = canceller

    def heard(self) -> None:
        """The client is told of the jobs: it can find them again where they outlive the request."""

    def over(self, ended: Collection[str]) -> None:
        """The request is over: so are those of its jobs that have not ended, unless they outlive it."""
        if self._canceller is not None:
            for job_id in self.ids:
                if job_id not in ended:
                    self._canceller.cancel(job_id)


async def create(context: Context, tailer: Tailer, canceller: Canceller, surface: Surface, request: Request) -> Response:
    """A plain request's jobs name this api process, and end with it: when the client goes away they are cancelled.

    With an Idempotency-Key the client has said that it may come back: the jobs go on, and the same request gets the same answer.
    """
    origin = submission.Origin.of(request)
    body = parse_json(await read_body(request, context.options.max_body_bytes))
    jobs = await surface.jobs(body, origin)
    plain = canceller if origin.idempotency_key is None else None
    if plain is not None:
        jobs = tuple(replace(job, served_by=context.incarnation) for job in jobs)
    made, replayed = await submit(context, jobs, lambda job_ids: RequestJobs(job_ids, plain))
    return respond(context, tailer, surface, body, made, replayed=replayed)


async def submit(
    context: Context, jobs: Sequence[NewJob], made: Callable[[Sequence[str]], RequestJobs]
) -> tuple[RequestJobs, bool]:
    """The jobs as ``made`` from their ids, and whether an earlier request made them. Raises as ``submission.submit`` does."""
    try:
        answer = await submission.submit(context, *jobs)
    except StoreUnavailable:  # the jobs may be there all the same, and their client will not hear of them
        made([job.job_id for job in jobs]).over(())
        raise
    return made(answer.job_ids), submission.is_replay(jobs[0], answer)


def respond(
    context: Context, tailer: Tailer, surface: Surface, body: Mapping[str, Any], made: RequestJobs, *, replayed: bool
) -> Response:
    """The answer of a request that waits for its jobs: as a stream where ``body`` asks for one."""
    response: Response
    if body.get("stream"):
        response = EventStream(context, tailer, made.ids, 0, surface.events(made, body), resumable=False)
    else:
        response = WholeAnswer(context, tailer, surface, made)
    if replayed:
        response.headers["Idempotent-Replayed"] = "true"
    return response


class WholeAnswer(Response):
    """Waits for the end of all jobs, or for the first that fails, then answers. A store that is away is a pause here, too."""

    def __init__(self, context: Context, tailer: Tailer, surface: Surface, jobs: RequestJobs) -> None:
        super().__init__()
        self._context = context
        self._tailer = tailer
        self._surface = surface
        self._jobs = jobs
        self._entries: dict[str, list[LogEntry]] = {job_id: [] for job_id in jobs.ids}
        self._finished: dict[str, JobRecord] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            tenant = scope["state"]["tenant"]
            async with follow(self._context, self._tailer, self._jobs.ids, tenant, resumable=False) as reader:
                watcher = asyncio.create_task(watch_client(receive, reader))
                try:
                    await self._collect(reader)
                finally:
                    watcher.cancel()
        except JobGone:
            raise JobNotFound(GONE, code="gone") from None
        except ReaderStopped:
            if self._context.drain.draining:
                raise Draining("this server is about to end: try again") from None
            return  # the client is gone: nobody to answer
        finally:
            self._jobs.over(self._finished)
        await self._answer()(scope, receive, send)

    async def _collect(self, reader: GroupReader) -> None:
        while len(self._finished) < len(self._entries):
            progress = await reader.next(self._context.options.keep_alive)
            if progress is None:
                continue
            record = progress.record
            self._entries[record.job_id] += progress.entries
            if progress.finished:
                self._finished[record.job_id] = record
                if record.status in _FAILED:
                    return

    def _answer(self) -> Response:
        outputs = [
            Output(self._finished[job_id], tuple(entries)) for job_id, entries in self._entries.items() if job_id in self._finished
        ]
        replayed = self.headers.get("Idempotent-Replayed")
        return JSONResponse(self._surface.answer(outputs), headers={"Idempotent-Replayed": replayed} if replayed else None)
