"""The native endpoints: ``/v1/jobs``."""

import re

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from service.api import openapi, submission, views
from service.api.context import Context
from service.api.edge import check_query, read_body
from service.api.events import NativeEvents, parse_cursor
from service.api.problems import InvalidRequest, JobNotFound
from service.api.schemas import JobRequest, parse_json, validate
from service.api.streams import EventStream
from service.api.tailer import Tailer
from storage.job_spec import JobSpec
from storage.records import JobRecord, JobStatus, LogEntry, SubmitOutcome

_JOB_ID = re.compile(r"[A-Za-z0-9_-]{1,80}")
_CURSOR = re.compile(r"[0-9]{1,15}")
_MAX_LIMIT = 100
JOB_PREFIX = "job_"


def job_routes(context: Context, tailer: Tailer) -> APIRouter:
    router = APIRouter(tags=["jobs"])

    @router.post("/v1/jobs", **openapi.CREATE_JOB)
    async def create(request: Request) -> Response:
        """Accept a job: once answered, it is durable."""
        return await _create(context, request)

    @router.get("/v1/jobs", **openapi.LIST_JOBS)
    async def list_jobs(request: Request) -> Response:
        """Newest first."""
        return await _list(context, request)

    @router.get("/v1/jobs/{job_id}", **openapi.GET_JOB)
    async def get(request: Request, job_id: str) -> Response:
        record, entries = await _read(context, request, job_id)
        return JSONResponse(views.job(record, entries))

    @router.post("/v1/jobs/{job_id}/cancel", **openapi.CANCEL_JOB)
    async def cancel(request: Request, job_id: str) -> Response:
        """Ends the job at once. A job that has ended already is answered as it is."""
        checked = checked_id(job_id)
        await context.store.run(lambda store: views.cancel_job(store, checked, request.state.tenant))
        record, entries = await _read(context, request, checked)
        return JSONResponse(views.job(record, entries))

    @router.get("/v1/jobs/{job_id}/events", **openapi.JOB_EVENTS)
    async def events(request: Request, job_id: str) -> Response:
        """The job's tokens as server-sent events, from the first or from Last-Event-ID (or ?after=N) on."""
        check_query(request, frozenset({"after"}))
        after, param = parse_cursor(request.headers.get("Last-Event-ID"), request.query_params.get("after"))
        return EventStream(context, tailer, [checked_id(job_id)], after, NativeEvents(context, after, param))

    return router


def checked_id(job_id: str) -> str:
    """What cannot be an id is answered like an unknown one."""
    if not _JOB_ID.fullmatch(job_id):
        raise JobNotFound("there is no such job: this is not a job id")
    return job_id


async def _read(context: Context, request: Request, job_id: str) -> tuple[JobRecord, list[LogEntry]]:
    checked = checked_id(job_id)
    return await context.store.run(lambda store: views.read_job(store, checked, request.state.tenant))


async def _create(context: Context, request: Request) -> Response:
    origin = submission.Origin.of(request)
    body = parse_json(await read_body(request, context.options.max_body_bytes))
    asked = validate(JobRequest, body)
    submission.check_model(context, asked.model)
    tokens, field = await submission.job_tokens(context, asked)
    max_tokens = submission.fit(context, len(tokens), asked.max_tokens, field)
    grammar = await submission.grammar(context, asked.response_format)
    spec = submission.make_spec(context, asked, max_tokens, metadata=asked.metadata, kind="job", grammar=grammar)
    hashed, job_id = submission.request_hash(body, origin), submission.new_job_id(JOB_PREFIX)
    job = submission.new_job(context, asked, origin, hashed, job_id, tokens, spec)
    answer = await submission.submit(context, job)
    status, seed = JobStatus.QUEUED, spec.seed
    (job_id,) = answer.job_ids
    headers = {"Location": f"/v1/jobs/{job_id}"}
    if answer.outcome is SubmitOutcome.EXISTS:
        record = await context.store.run(lambda store: store.get(job_id))
        if record is not None:
            status, seed = record.status, JobSpec.from_json(record.spec).seed
    if submission.is_replay(job, answer):
        headers["Idempotent-Replayed"] = "true"
    # The seed, so that a job whose seed was drawn here can be run again.
    shown = {"id": job_id, "object": "job", "status": status.value, "model": spec.model, "seed": seed}
    return JSONResponse(shown, 202, headers)


async def _list(context: Context, request: Request) -> Response:
    check_query(request, frozenset({"status", "limit", "cursor"}))
    query, tenant = request.query_params, request.state.tenant
    status, limit, cursor = query.get("status"), query.get("limit", "20"), query.get("cursor")
    if status is not None and status not in set(JobStatus):
        raise InvalidRequest(f"status: must be one of {', '.join(JobStatus)}", param="status")
    if not limit.isdecimal() or not 1 <= int(limit[:9]) <= _MAX_LIMIT:
        raise InvalidRequest(f"limit: must be a whole number from 1 to {_MAX_LIMIT}", param="limit")
    if cursor is not None and not _CURSOR.fullmatch(cursor):
        raise InvalidRequest("cursor: must be the next_cursor of the page before", param="cursor")
    wanted = JobStatus(status) if status is not None else None
    page = await context.store.run(lambda store: store.jobs(status=wanted, tenant=tenant, limit=int(limit), cursor=cursor))
    return JSONResponse(
        {
            "object": "list",
            "data": [views.job(record, None) for record in page.jobs],
            "next_cursor": page.next_cursor,
            "has_more": page.next_cursor is not None,
        }
    )
