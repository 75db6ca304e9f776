"""What is durable, as plain values: no Redis, no clock, no I/O.

Everything here is frozen and comparable, so that both job stores (Redis and in-memory) can be held against each other.
Times are seconds since the epoch by the *store's* clock (Redis ``TIME``), never by this machine's.
"""

from dataclasses import dataclass, field
from enum import StrEnum


class JobStatus(StrEnum):
    QUEUED = "queued"
    IN_PROGRESS = "in_progress"
    COMPLETED = "completed"
    INCOMPLETE = "incomplete"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def terminal(self) -> bool:
        return not TRANSITIONS[self]


#: The only table of legal moves; terminal states have none. The Lua scripts test the same words.
TRANSITIONS: dict[JobStatus, frozenset[JobStatus]] = {
    JobStatus.QUEUED: frozenset({JobStatus.IN_PROGRESS, JobStatus.FAILED, JobStatus.CANCELLED}),
    JobStatus.IN_PROGRESS: frozenset(
        {JobStatus.QUEUED, JobStatus.COMPLETED, JobStatus.INCOMPLETE, JobStatus.FAILED, JobStatus.CANCELLED}
    ),
    JobStatus.COMPLETED: frozenset(),
    JobStatus.INCOMPLETE: frozenset(),
    JobStatus.FAILED: frozenset(),
    JobStatus.CANCELLED: frozenset(),
}


@dataclass(frozen=True, slots=True)
class StoreIdentity:
    """Which store this is, and how far it has come (PROTOCOL.md 5)."""

    store_id: str
    epoch: int
    commit: int


@dataclass(frozen=True, slots=True)
class NewJob:
    """A job as the api submits it. The api makes ``job_id`` first, so that its own retry finds itself."""

    job_id: str
    spec: str  #: canonical JSON of what the client asked for, stored verbatim
    prompt_token_ids: tuple[int, ...]
    model_fingerprint: str  #: names the queue
    max_tokens: int
    request_hash: str  #: of the parsed body, path and tenant; compared when an idempotency key is met again
    priority: int = 0  #: -100..100, higher runs first
    deadline_seconds: float | None = None
    tenant: str = ""
    idempotency_key: str | None = None
    request_id: str = ""
    traceparent: str = ""
    group: str = ""  #: the id of the group's first job; "" for a job that was submitted alone
    served_by: str = ""  #: incarnation of the api that the job ends with (a plain foreground one); "": it outlives them all
    batch: str = ""  #: id of the batch whose line it is
    choices: int = 1  #: jobs of that line
    stored: bool = False  #: listed among its tenant's stored jobs, to be found again for as long as it is there


class SubmitOutcome(StrEnum):
    CREATED = "created"
    EXISTS = "exists"  #: same idempotency key and body (or these very job ids): the jobs that are there
    CONFLICT = "conflict"  #: same key, other body
    FULL = "full"  #: the queue limit leaves no room for all of them
    TENANT_FULL = "tenant_full"  #: the tenant's own limit leaves none


@dataclass(frozen=True, slots=True)
class Submitted:
    outcome: SubmitOutcome
    job_ids: tuple[str, ...]  #: in the order in which they were submitted


@dataclass(frozen=True, slots=True)
class LogEntry:
    """One committed token. ``text`` is what became visible with it (may be empty)."""

    token: int
    text: str
    logprobs: str = ""  #: JSON, or "" when none were asked for


@dataclass(frozen=True, slots=True)
class JobError:
    code: str
    message: str


@dataclass(frozen=True, slots=True)
class JobRecord:
    job_id: str
    spec: str
    prompt_token_ids: tuple[int, ...]
    model_fingerprint: str
    max_tokens: int
    status: JobStatus
    order: int  #: place in the queue among equals; kept when a job goes back to the queue
    priority: int = 0
    tenant: str = ""
    engine_id: str = ""
    incarnation: str = ""
    fence: int = 0
    strikes: int = 0
    recoveries: int = 0
    log_length: int = 0
    chain: str = ""  #: hex; h0 before the first token (storage.chain)
    arithmetic_fingerprint: str = ""  #: of the first engine that computed for it
    finish_reason: str = ""  #: "stop" or "length" once finished
    error: JobError | None = None
    cached_tokens: int = 0  #: prompt tokens whose KV was found, not computed
    tokens_replayed: int = 0
    pages_restored: int = 0
    created_at: float = 0.0
    started_at: float | None = None
    finished_at: float | None = None
    deadline_at: float | None = None
    request_id: str = ""
    traceparent: str = ""
    group: str = ""
    served_by: str = ""
    batch: str = ""
    choices: int = 1
    stored: bool = False
    metadata: str = ""  #: JSON, once it was described anew: the spec, which the chain begins with, keeps what it was made with


@dataclass(frozen=True, slots=True)
class LogRead:
    """Ask for a job's entries after the first ``after`` tokens, at most ``limit``."""

    job_id: str
    after: int = 0
    limit: int = 1000


@dataclass(frozen=True, slots=True)
class LogSlice:
    """``record`` was read before ``entries``: a terminal record with ``after + len(entries) == log_length`` is all there is."""

    record: JobRecord
    after: int
    entries: tuple[LogEntry, ...]


@dataclass(frozen=True, slots=True)
class JobPage:
    jobs: tuple[JobRecord, ...]  #: newest first
    next_cursor: str | None


# --- engine side -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class EngineInfo:
    engine_id: str
    boot_id: str
    host: str
    pid: int
    pool_id: str  #: empty: no pool file
    model_fingerprint: str
    model_name: str
    page_size: int
    device_pages: int  #: a job that needs more than this can never run here
    max_context: int
    prefill_chunk: int = 0  #: with the next field, what the identities of its pages were made with
    arithmetic_fingerprint: str = ""


@dataclass(frozen=True, slots=True)
class EngineRecord:
    info: EngineInfo
    incarnation: str
    beat: int
    dead: bool
    job_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ApiRecord:
    """An api while jobs live that end with it."""

    incarnation: str
    beat: int  #: no number comes twice, whoever beats
    job_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class OwnedJob:
    """A job given to an incarnation, with the fence that every later write must prove."""

    job_id: str
    fence: int
    strikes: int


class RegisterOutcome(StrEnum):
    REGISTERED = "registered"
    OTHER_HOST = "other_host"  #: record is of another boot id: wait one lease and ask again with ``seen`` set
    IN_USE = "in_use"  #: its beat moved while we waited: a copy of a living engine's directory
    OTHER_MODEL = "other_model"  #: jobs of another model are listed under this engine id


@dataclass(frozen=True, slots=True)
class Registered:
    outcome: RegisterOutcome
    owned: tuple[OwnedJob, ...] = ()
    failed: tuple[str, ...] = ()  #: jobs failed as poison by this registration
    holder: EngineRecord | None = None  #: who holds the id, for OTHER_HOST, IN_USE and OTHER_MODEL


class JobAnswer(StrEnum):
    """The answer to a write that proves a fence. In the order in which the scripts check (PROTOCOL.md 2)."""

    GONE = "gone"
    TERMINAL = "terminal"
    FENCED = "fenced"
    ALREADY = "already"
    GAP = "gap"
    OK = "ok"

    @property
    def accepted(self) -> bool:
        return self in (JobAnswer.OK, JobAnswer.ALREADY)


@dataclass(frozen=True, slots=True)
class Finish:
    status: JobStatus
    finish_reason: str = ""
    error: JobError | None = None


@dataclass(frozen=True, slots=True)
class Commit:
    """Tokens of one job, made durable in one script. ``tokens`` may be empty when only ``finish`` or counters are to be written."""

    job_id: str
    fence: int
    expected: int  #: log length before
    chain: str  #: chain hash after ``tokens``
    tokens: tuple[LogEntry, ...] = ()
    finish: Finish | None = None
    arithmetic_fingerprint: str = ""
    cached_tokens: int = 0  #: added to the record
    tokens_replayed: int = 0  #: added to the record
    pages_restored: int = 0  #: added to the record


@dataclass(frozen=True, slots=True)
class PageEntry:
    """One row of a pool table: what a host page holds (PROTOCOL.md 6)."""

    identity: str  #: hex blake2b-128
    checksum: int  #: xxh3-64 of the page's bytes
    #: seconds since it was published, by the store's clock; 0 where an earlier version did not note it
    age: float = field(default=0.0, compare=False)


@dataclass(frozen=True, slots=True)
class StepWrites:
    """All that one engine step makes durable: sent as one pipeline, in this order."""

    commits: tuple[Commit, ...] = ()
    publish: dict[int, PageEntry] = field(default_factory=dict)  #: host page -> entry
    drop: tuple[int, ...] = ()  #: host pages whose entries go


@dataclass(frozen=True, slots=True)
class StepAnswers:
    commits: tuple[JobAnswer, ...]
    commit: int  #: the store's commit counter after the pipeline


@dataclass(frozen=True, slots=True)
class Renewed:
    owned: tuple[OwnedJob, ...]  #: held but not listed: drop; listed but not held: adopt
    now: float
    commit: int
