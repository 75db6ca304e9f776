"""Every error the api answers with, in one table.

ApiError
├── InvalidRequest          the request is wrong in itself; names the field
│   ├── CursorAhead         a stream position that the log has not reached
│   └── JobTooLarge         no engine could ever hold this job
├── Unauthorized            no API key, or none of ours
├── ModelNotFound
├── JobNotFound             unknown, malformed or purged id, or another tenant's
├── FileNotFound            the same of files
├── BatchNotFound           the same of batches
├── RouteNotFound
├── MethodNotAllowed
├── BodyTooLarge
├── IdempotencyConflict     the same key came with another body
├── QueueFull               of the server, or of one tenant
├── RateLimited             too many requests or tokens of one tenant in a minute
├── TooManyStreams
├── FileStoreFull           the files that are kept leave no room
├── TooManyBatches          as many are under way as may be
├── JobFailed               a completion whose job failed
├── JobCancelled            a completion whose job was cancelled by somebody else
├── DeadlineExceeded        a completion that was not finished by its own deadline
└── Draining                this process is about to end

plus the tree of ``storage.errors``. Native endpoints answer RFC 9457 problem+json; the OpenAI endpoints answer OpenAI's envelope.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from storage import errors as storage

#: Paths whose clients are OpenAI SDKs.
OPENAI_PATHS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/files",
    "/v1/batches",
    "/v1/models",
)


class ApiError(Exception):
    """``param`` names the field or header at fault; ``code`` is for programs and defaults to the table's."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None, **extra: Any) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code
        self.extra = extra  #: further members of the problem document


class InvalidRequest(ApiError):
    pass


class CursorAhead(InvalidRequest):
    pass


class JobTooLarge(InvalidRequest):
    pass


class Unauthorized(ApiError):
    pass


class ModelNotFound(ApiError):
    pass


class JobNotFound(ApiError):
    pass


class FileNotFound(ApiError):
    pass


class BatchNotFound(ApiError):
    pass


class FileStoreFull(ApiError):
    pass


class TooManyBatches(ApiError):
    pass


class RouteNotFound(ApiError):
    pass


class MethodNotAllowed(ApiError):
    pass


class BodyTooLarge(ApiError):
    pass


class IdempotencyConflict(ApiError):
    pass


class QueueFull(ApiError):
    pass


class RateLimited(ApiError):
    """``retry_after``: seconds, here for its header."""


class TooManyStreams(ApiError):
    pass


class JobFailed(ApiError):
    pass


class JobCancelled(ApiError):
    pass


class DeadlineExceeded(ApiError):
    pass


class Draining(ApiError):
    pass


@dataclass(frozen=True, slots=True)
class Problem:
    status: int
    code: str
    title: str
    openai_type: str
    retry_after: int | None = None  #: seconds


_BAD = "invalid_request_error"
_BUSY = "service_unavailable_error"
_OURS = "server_error"

#: An exception is answered by the entry of its own class. A test proves that none is missing.
TABLE: dict[type[Exception], Problem] = {
    ApiError: Problem(500, "internal_error", "Internal error", _OURS),
    InvalidRequest: Problem(400, "invalid_value", "The request is not valid", _BAD),
    CursorAhead: Problem(400, "cursor_ahead", "The stream position is ahead of the log", _BAD),
    JobTooLarge: Problem(400, "job_too_large", "No engine can hold this job", _BAD),
    Unauthorized: Problem(401, "invalid_api_key", "A valid API key is needed", _BAD),
    ModelNotFound: Problem(404, "model_not_found", "No such model", _BAD),
    JobNotFound: Problem(404, "job_not_found", "No such job", _BAD),
    FileNotFound: Problem(404, "file_not_found", "No such file", _BAD),
    BatchNotFound: Problem(404, "batch_not_found", "No such batch", _BAD),
    FileStoreFull: Problem(429, "file_store_full", "There is no room for more files", "rate_limit_error", retry_after=60),
    TooManyBatches: Problem(429, "too_many_batches", "Too many batches are under way", "rate_limit_error", retry_after=60),
    RouteNotFound: Problem(404, "not_found", "No such page", _BAD),
    MethodNotAllowed: Problem(405, "method_not_allowed", "Method not allowed", _BAD),
    BodyTooLarge: Problem(413, "body_too_large", "The request body is too large", _BAD),
    IdempotencyConflict: Problem(422, "idempotency_conflict", "The Idempotency-Key was used with another request", _BAD),
    QueueFull: Problem(429, "queue_full", "The queue is full", "rate_limit_error", retry_after=5),
    RateLimited: Problem(429, "rate_limit_exceeded", "Too fast", "rate_limit_error", retry_after=5),
    TooManyStreams: Problem(429, "too_many_streams", "Too many open streams", "rate_limit_error", retry_after=5),
    JobFailed: Problem(500, "job_failed", "The job failed", _OURS),
    # 400, not 409: the OpenAI SDK sends a request again after a 409, which would start the cancelled work anew.
    JobCancelled: Problem(400, "job_cancelled", "The job was cancelled", _BAD),
    # 400 for the same reason: after a 500 or 408 the SDK would ask for the work that came too late, twice more.
    DeadlineExceeded: Problem(400, "deadline_exceeded", "The job was not finished by its deadline", _BAD),
    Draining: Problem(503, "draining", "This server is about to end", _BUSY, retry_after=2),
    storage.StorageError: Problem(500, "storage_error", "Internal error", _OURS),
    storage.StoreUnavailable: Problem(503, "store_unavailable", "The job store does not answer", _BUSY, retry_after=2),
    storage.StoreFull: Problem(503, "store_full", "The job store is out of memory", _BUSY, retry_after=10),
    storage.StoreMisconfigured: Problem(503, "store_misconfigured", "The job store may lose jobs", _BUSY, retry_after=30),
    storage.WrongStore: Problem(503, "wrong_store", "The job store is not the one we belong to", _BUSY, retry_after=30),
    # The api never takes the engine's part, so these are our own bugs here.
    storage.EngineDead: Problem(500, "storage_error", "Internal error", _OURS),
    storage.PoolLocked: Problem(500, "storage_error", "Internal error", _OURS),
    storage.PoolError: Problem(500, "storage_error", "Internal error", _OURS),
}

_INTERNAL = TABLE[ApiError]


def problem_of(error: BaseException) -> Problem:
    for kind in type(error).__mro__:
        if kind in TABLE:
            return TABLE[kind]
    return _INTERNAL


def from_http_exception(error: HTTPException, method: str, path: str, allowed: str) -> ApiError:
    """The router's own 404 and 405, as ours."""
    if error.status_code == 405:
        return MethodNotAllowed(f"{method} is not possible on {path}", allow=allowed)
    if error.status_code == 404:
        return RouteNotFound(f"there is nothing at {path}")
    return InvalidRequest(str(error.detail))


def error_response(error: BaseException, *, path: str, request_id: str) -> JSONResponse:
    """The answer to ``error``, in the form that clients of ``path`` expect. Never carries a path of ours or a stack."""
    problem = problem_of(error)
    headers: dict[str, str] = {}
    if problem.retry_after is not None:
        headers["Retry-After"] = str(problem.retry_after)
    if isinstance(error, Unauthorized):
        headers["WWW-Authenticate"] = "Bearer"
    extra = dict(error.extra) if isinstance(error, ApiError) else {}
    if "retry_after" in extra:
        headers["Retry-After"] = str(extra.pop("retry_after"))
    if "allow" in extra:
        headers["Allow"] = extra.pop("allow")
    if path.startswith(OPENAI_PATHS):
        return JSONResponse(openai_body(error), problem.status, headers)
    body = {**problem_body(error), "instance": path, "request_id": request_id, **extra}
    return JSONResponse(body, problem.status, headers, media_type="application/problem+json")


def openai_body(error: BaseException) -> dict[str, Any]:
    return {"error": {"message": detail_of(error), "type": problem_of(error).openai_type, **_named(error)}}


def problem_body(error: BaseException) -> dict[str, Any]:
    problem = problem_of(error)
    named = _named(error)
    return {
        "type": f"urn:midsentence:problem:{problem.code}",
        "title": problem.title,
        "status": problem.status,
        "detail": detail_of(error),
        **named,
    }


def detail_of(error: BaseException) -> str:
    if isinstance(error, ApiError):
        return error.message
    if isinstance(error, storage.StoreUnavailable):
        return "the job store does not answer; what was accepted is safe: try again"  # its own words name hosts and sockets
    if isinstance(error, storage.StorageError) and problem_of(error).status == 503:
        return str(error)
    return "something went wrong here; the server's log has it under this request id"


def _named(error: BaseException) -> Mapping[str, str | None]:
    problem = problem_of(error)
    if isinstance(error, ApiError):
        return {"param": error.param, "code": error.code or problem.code}
    return {"param": None, "code": problem.code}
