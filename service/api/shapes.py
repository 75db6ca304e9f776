"""What clients get, as models. They make the OpenAPI document and nothing else: ``views`` and ``openai`` write the
answers, and ``tests/service/api/test_schema.py`` holds the two against each other."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from storage.records import JobStatus

FinishReason = Literal["stop", "length"]


class _Shape(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Usage(_Shape):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    cached_tokens: int = Field(description="Prompt tokens whose KV was found, not computed.")


class JobError(_Shape):
    code: str
    message: str


class Recovery(_Shape):
    count: int
    tokens_replayed: int
    pages_restored: int


class TokenLogprobs(_Shape):
    token: int
    logprob: float
    top: list[tuple[int, float]]


class Output(_Shape):
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None
    logprobs: list[TokenLogprobs | None] = Field([], description="Only where the job asked for them.")


class JobSummary(_Shape):
    """A job as lists show it. Times are seconds since the epoch, by the store's clock."""

    id: str
    object: Literal["job"]
    status: JobStatus
    model: str
    usage: Usage
    error: JobError | None
    recovery: Recovery
    created_at: float
    started_at: float | None
    finished_at: float | None
    deadline_at: float | None
    priority: int
    metadata: dict[str, str]
    request_id: str
    group: str | None


class Job(JobSummary):
    output: Output


class AcceptedJob(_Shape):
    id: str
    object: Literal["job"]
    status: JobStatus
    model: str
    seed: int = Field(description="The one given, or the one that was drawn.")


class JobList(_Shape):
    object: Literal["list"]
    data: list[JobSummary]
    next_cursor: str | None
    has_more: bool


class Problem(BaseModel):
    """RFC 9457. Some problems have further members."""

    type: str
    title: str
    status: int
    detail: str
    code: str
    param: str | None = Field(description="The field or header at fault.")
    instance: str
    request_id: str


class OpenAIErrorDetail(_Shape):
    message: str
    type: str
    param: str | None
    code: str


class OpenAIError(_Shape):
    error: OpenAIErrorDetail


class CompletionLogprobs(_Shape):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(_Shape):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason


class PromptTokensDetails(_Shape):
    cached_tokens: int


class CompletionUsage(_Shape):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class Completion(_Shape):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: CompletionUsage


class JobEvent(_Shape):
    """One event of a job's stream."""

    event: Literal["queued", "in_progress", "recovered", "token", "done", "failed", "cancelled"]
    data: str = Field(description="JSON")
    id: str = Field("", pattern="^[0-9]+$", description="Tokens seen; only of tokens and the end.")


class Totals(_Shape):
    """Since this life of the engine began."""

    tokens: int = Field(description="Committed.")
    steps: int
    step_seconds: float
    gaps: int = Field(description="Between two tokens of a job.")
    gap_seconds: float
    recovered: int = Field(description="Jobs taken up again after a death of their owner.")
    pages_restored: int
    tokens_replayed: int


class Vitals(_Shape):
    """What an engine said last. Page maps are run lengths, by page id: `2.3oS` is two free pages, three open ones and a sealed one.

    Device: `.` free, `o` open (in use, not yet full), `s` sealed, `h` shared by several jobs, `c` cached, `l` leaving (being copied
    out, needed by no job); S, H, C: published as well, so a crash does not cost it. Host: `.` free, `f` being filled, `d` not yet
    published, `B` published and backing a job, `P` published, `w` swapped out by a preempted job, `x` going.
    """

    at: float = Field(description="When it came, by the API's clock.")
    clock: float = Field(description="The engine's own, in seconds: rates are differences of totals over differences of this.")
    running: int
    waiting: int
    checkpoint_lag: int = Field(description="Tokens that a crash now would make somebody replay.")
    totals: Totals
    device: str = Field(pattern=r"^(\d*[.oshclSHC])*$")
    host: str = Field(pattern=r"^(\d*[.fdBPwx])*$")


class EngineView(_Shape):
    id: str
    incarnation: str
    model: str
    state: Literal["living", "silent", "dead"] = Field(description="dead: its jobs were taken over.")
    silent_seconds: float | None = Field(description="Since its last beat; there is one each second.")
    jobs: int
    page_size: int
    device_pages: int
    vitals: Vitals | None = Field(description="Only of engines that somebody follows just now.")


class Moment(_Shape):
    """What happened to an engine or the store since this API began."""

    at: float
    kind: str
    engine_id: str
    seconds: float | None = Field(description="How long it was away, where it came back.")
    jobs: int | None
    pages_restored: int | None
    tokens_replayed: int | None


class Overview(_Shape):
    """Times are seconds since the epoch, by the API's clock."""

    object: Literal["overview"]
    now: float
    model: str
    store_away_since: float | None
    jobs: dict[JobStatus, int] = Field(description="Jobs in the store, of all tenants, by status.")
    engines: list[EngineView]
    timeline: list[Moment]
    demo_controls: bool


class OverviewEvent(_Shape):
    """One event of the overview's stream."""

    event: Literal["overview"]
    data: str = Field(description="JSON of an Overview.")


class CompletionEvent(_Shape):
    """One event of a streamed completion."""

    event: Literal["message"] = "message"
    data: str = Field(description="JSON; at last [DONE]")


class Model(_Shape):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int


class ModelList(_Shape):
    object: Literal["list"]
    data: list[Model]


class Readiness(_Shape):
    ready: bool
    reasons: dict[str, str]


class Liveness(_Shape):
    live: Literal[True]


class Version(_Shape):
    version: str
    model: str


def all_shapes() -> list[type[BaseModel]]:
    """What answers are made of; their parts come along."""
    return [
        AcceptedJob, Job, JobList, JobEvent, Problem, OpenAIError, Completion, CompletionEvent, Model, ModelList, Readiness,
        Liveness, Version, Overview, OverviewEvent,
    ]  # fmt: skip


def reference(shape: type[BaseModel]) -> dict[str, Any]:
    return {"$ref": f"#/components/schemas/{shape.__name__}"}
