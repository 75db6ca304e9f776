"""The OpenAPI document: for each operation what may be sent, every status it answers with, and where an answer leads.

FastAPI cannot read this off the handlers, which take bodies apart themselves. The constants here go into the route decorators;
``tests/service/api/test_schema.py`` asks a running api whether all of it is true.
"""

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.responses import Response

from service.api import examples
from service.api.gate import PUBLIC
from service.api.openai.batch_requests import BatchRequest
from service.api.openai.batch_shapes import BATCH_SHAPES
from service.api.openai.chat_requests import ChatRequest, ChatUpdate
from service.api.openai.chat_shapes import CHAT_SHAPES
from service.api.openai.response_requests import ResponseRequest
from service.api.openai.response_shapes import RESPONSE_SHAPES
from service.api.problems import (
    OPENAI_PATHS,
    TABLE,
    BodyTooLarge,
    IdempotencyConflict,
    InvalidRequest,
    JobNotFound,
    ModelNotFound,
    QueueFull,
    TooManyStreams,
    Unauthorized,
)
from service.api.schemas import CompletionRequest, JobRequest
from service.api.shapes import (
    AcceptedJob,
    Completion,
    CompletionEvent,
    Job,
    JobEvent,
    JobList,
    Liveness,
    Model,
    ModelList,
    OpenAIError,
    Overview,
    OverviewEvent,
    Problem,
    Readiness,
    Version,
    all_shapes,
    reference,
)
from storage.errors import StoreUnavailable
from storage.records import JobStatus

JSON, EVENTS = "application/json", "text/event-stream"
SUBMISSION = (InvalidRequest, ModelNotFound, BodyTooLarge, IdempotencyConflict, QueueFull, StoreUnavailable)
Operation = dict[str, Any]  #: keyword arguments of a route decorator


def described(app: FastAPI) -> dict[str, Any]:
    """The whole document; made once."""
    document = get_openapi(title=app.title, version=app.version, summary=app.summary, routes=app.routes)
    requests = (JobRequest, CompletionRequest, ChatRequest, ChatUpdate, ResponseRequest, BatchRequest)
    shapes = (*CHAT_SHAPES, *RESPONSE_SHAPES, *BATCH_SHAPES, *all_shapes())
    models = [(model, "validation") for model in (*requests, *shapes)]
    _, definitions = models_json_schema(models, ref_template="#/components/schemas/{model}")  # type: ignore[arg-type]
    document["components"] = {"schemas": definitions["$defs"]}
    for path, operations in document["paths"].items():
        for operation in operations.values():
            if path not in PUBLIC:  # as the gate decides, for whatever route there is
                refused = refusals(OpenAIError if path.startswith(OPENAI_PATHS) else Problem, Unauthorized)
                operation["responses"] |= {str(status): answer for status, answer in refused.items()}
            if operation["responses"].get("422", {}).get("description") == "Validation Error":
                del operation["responses"]["422"]  # FastAPI's own, for path parameters: any text is one, and unknown ids are 404
    return document


def answer(description: str, shape: type[BaseModel], media_type: str = JSON, **more: Any) -> dict[str, Any]:
    return {"description": description, "content": {media_type: {"schema": reference(shape)}}, **more}


def refusals(shape: type[BaseModel], *errors: type[Exception]) -> dict[int, dict[str, Any]]:
    """By status, as the table of problems has it."""
    media_type = JSON if shape is OpenAIError else "application/problem+json"
    return {TABLE[error].status: answer(TABLE[error].title, shape, media_type) for error in errors}


def parameter(place: str, name: str, description: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"in": place, "name": name, "description": description, "required": False, "schema": schema}


def body(model: type[BaseModel], shown: examples.Examples | None = None) -> dict[str, Any]:
    content: dict[str, Any] = {"schema": reference(model)}
    if shown is not None:
        content["examples"] = {what: {"value": value} for what, value in shown.items()}
    return {"required": True, "content": {JSON: content}}


def operation(responses: dict[int, dict[str, Any]], *, status_code: int = 200, **extra: Any) -> Operation:
    return {"status_code": status_code, "response_class": Response, "responses": responses, "openapi_extra": extra}


def _led_to(operation_id: str, description: str) -> dict[str, Any]:
    return {"operationId": operation_id, "parameters": {"job_id": "$response.body#/id"}, "description": description}


_CURSOR = {"type": "string", "pattern": "^[0-9]{1,15}$"}
IDEMPOTENCY_KEY = parameter(
    "header",
    "Idempotency-Key",
    "The same key with the same request gets the same job, for as long as that is kept.",
    {"type": "string", "pattern": "^[!-~]{1,255}$"},
)
_LINKS = {
    "job": _led_to("get_job", "The job."),
    "events": _led_to("stream_job_events", "Its tokens."),
    "cancel": _led_to("cancel_job", "Its end."),
}

CREATE_JOB = operation(
    {202: answer("The job is durable", AcceptedJob, links=_LINKS), **refusals(Problem, *SUBMISSION)},
    status_code=202,
    operationId="create_job",
    requestBody=body(JobRequest, examples.JOB),
    parameters=[IDEMPOTENCY_KEY],
)
LIST_JOBS = operation(
    {200: answer("A page of jobs, newest first", JobList), **refusals(Problem, InvalidRequest, StoreUnavailable)},
    operationId="list_jobs",
    parameters=[
        parameter("query", "status", "Only jobs in this state.", {"type": "string", "enum": list(JobStatus)}),
        parameter("query", "limit", "Jobs in a page.", {"type": "integer", "minimum": 1, "maximum": 100, "default": 20}),
        parameter("query", "cursor", "`next_cursor` of the page before.", _CURSOR),
    ],
)
GET_JOB = operation(
    {200: answer("The job with its output so far", Job), **refusals(Problem, JobNotFound, StoreUnavailable)},
    operationId="get_job",
)
CANCEL_JOB = operation(
    {200: answer("The job as it ended", Job), **refusals(Problem, JobNotFound, StoreUnavailable)},
    operationId="cancel_job",
)
JOB_EVENTS = operation(
    {
        200: answer("Events, each as the schema says; the last is `done`, `failed` or `cancelled`", JobEvent, EVENTS),
        204: {"description": "The client has seen everything, the end included"},
        **refusals(Problem, InvalidRequest, JobNotFound, StoreUnavailable),
    },
    operationId="stream_job_events",
    parameters=[
        parameter("query", "after", "Tokens seen; the header wins.", _CURSOR),
        parameter("header", "Last-Event-ID", "Tokens seen: the last `id` of the stream before.", _CURSOR),
    ],
)
OVERVIEW = operation(
    {200: answer("The service as a whole", Overview), **refusals(Problem, InvalidRequest)}, operationId="get_overview"
)
OVERVIEW_EVENTS = operation(
    {200: answer("An overview each second", OverviewEvent, EVENTS), **refusals(Problem, InvalidRequest, TooManyStreams)},
    operationId="stream_overview",
)
_WHOLE_OR_STREAM = {
    "description": "The completion; with `stream`, chunks and `[DONE]`",
    "content": {JSON: {"schema": reference(Completion)}, EVENTS: {"schema": reference(CompletionEvent)}},
}
CREATE_COMPLETION = operation(
    {200: _WHOLE_OR_STREAM, **refusals(OpenAIError, *SUBMISSION)},
    operationId="create_completion",
    requestBody=body(CompletionRequest, examples.COMPLETION),
    parameters=[IDEMPOTENCY_KEY],
)
LIST_MODELS = operation({200: answer("The one model served", ModelList)}, operationId="list_models")
GET_MODEL = operation({200: answer("The model", Model), **refusals(OpenAIError, ModelNotFound)}, operationId="get_model")
LIVENESS = operation({200: answer("The process answers", Liveness)}, operationId="get_liveness")
READINESS = operation(
    {200: answer("Jobs are taken, and an engine works on them", Readiness), 503: answer("Not now, and why", Readiness)}
)
METRICS = operation(
    {200: {"description": "Prometheus metrics", "content": {"text/plain": {"schema": {"type": "string"}}}}},
    operationId="get_metrics",
)
VERSION = operation({200: answer("Version and model", Version)}, operationId="get_version")
