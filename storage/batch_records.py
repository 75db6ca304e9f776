"""Files and batches as plain values, as ``storage.records`` has jobs (PROTOCOL.md 10)."""

from dataclasses import dataclass, field
from enum import StrEnum

from storage.records import JobError, NewJob

#: Bytes of a file that are stored, and read, together.
CHUNK = 256 << 10
#: Jobs that one line can make: the choices of its request.
MAX_CHOICES = 128


class BatchOutput(StrEnum):
    """The files of an ended batch: the lines with an answer, and those without."""

    OUTPUT = "output"
    ERROR = "error"


class BatchStatus(StrEnum):
    """OpenAI's words. ``finalizing`` is for a batch that expires until its last job is ended; one that completes only passes it."""

    VALIDATING = "validating"
    FAILED = "failed"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    COMPLETED = "completed"
    EXPIRED = "expired"
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"

    @property
    def terminal(self) -> bool:
        return not BATCH_TRANSITIONS[self]


#: The only table of legal moves; terminal states have none. The Lua scripts test the same words.
BATCH_TRANSITIONS: dict[BatchStatus, frozenset[BatchStatus]] = {
    BatchStatus.VALIDATING: frozenset(
        {BatchStatus.FAILED, BatchStatus.IN_PROGRESS, BatchStatus.FINALIZING, BatchStatus.CANCELLING}
    ),
    BatchStatus.IN_PROGRESS: frozenset({BatchStatus.FINALIZING, BatchStatus.CANCELLING}),
    BatchStatus.FINALIZING: frozenset({BatchStatus.COMPLETED, BatchStatus.EXPIRED}),
    BatchStatus.CANCELLING: frozenset({BatchStatus.CANCELLED}),
    BatchStatus.FAILED: frozenset(),
    BatchStatus.COMPLETED: frozenset(),
    BatchStatus.EXPIRED: frozenset(),
    BatchStatus.CANCELLED: frozenset(),
}


@dataclass(frozen=True, slots=True)
class NewFile:
    """``upload_id``: random, of this very upload; so two that are sent under one ``file_id`` cannot mix their bytes."""

    file_id: str
    upload_id: str
    chunks: int
    num_bytes: int
    sha256: str
    filename: str
    purpose: str = "batch"
    tenant: str = ""


@dataclass(frozen=True, slots=True)
class FileRecord:
    file_id: str
    upload_id: str
    chunks: int
    num_bytes: int
    sha256: str
    filename: str
    purpose: str
    tenant: str
    order: int
    created_at: float


class ChunkOutcome(StrEnum):
    OK = "ok"
    CLOSED = "closed"  #: the upload is a file by now
    FULL = "full"  #: all files together would have more bytes than they may


class CreateOutcome(StrEnum):
    """Of a file or a batch."""

    CREATED = "created"
    EXISTS = "exists"  #: under this id there is one: an earlier one, or this very one
    FULL = "full"  #: as many as there may be
    INCOMPLETE = "incomplete"  #: a sweep took the upload for a dead one
    NO_FILE = "no_file"  #: the tenant has no such file


@dataclass(frozen=True, slots=True)
class CreatedFile:
    outcome: CreateOutcome
    record: FileRecord | None = None


@dataclass(frozen=True, slots=True)
class NewBatch:
    """``line_prefix`` and the number of a line, from 1, are the id of its first job."""

    batch_id: str
    input_file_id: str
    line_prefix: str
    endpoint: str
    window_seconds: float
    request_hash: str
    tenant: str = ""
    metadata: dict[str, str] | None = None
    request_id: str = ""
    traceparent: str = ""


@dataclass(frozen=True, slots=True)
class BatchError:
    """What validation found. ``line`` from 1; None: the file as a whole."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None


@dataclass(frozen=True, slots=True)
class BatchRecord:
    batch_id: str
    input_file_id: str
    line_prefix: str
    endpoint: str
    request_hash: str
    status: BatchStatus
    order: int
    created_at: float
    expires_at: float
    tenant: str = ""
    metadata: dict[str, str] | None = None
    request_id: str = ""
    traceparent: str = ""
    total: int = 0  #: lines; 0 until they are validated
    completed: int = 0  #: lines with an answer
    failed: int = 0  #: lines without one; at the end all others
    fed: int = 0  #: lines whose jobs were made, from the first on
    position: int = 0  #: where in the file the line after these begins
    errors: tuple[BatchError, ...] = ()
    reached: dict[BatchStatus, float] = field(default_factory=dict)  #: when the batch came to each status; not ``validating``
    deleted: frozenset[BatchOutput] = frozenset()  #: of its files

    @property
    def live_lines(self) -> int:
        return self.fed - self.completed - self.failed

    def line_id(self, line: int) -> str:
        return f"{self.line_prefix}{line}"


@dataclass(frozen=True, slots=True)
class CreatedBatch:
    outcome: CreateOutcome
    record: BatchRecord | None = None


@dataclass(frozen=True, slots=True)
class FedLine:
    """``jobs``: a group. With an ``error`` no job could be made of the line: the one here stands for it, and has failed."""

    line: int
    position: int  #: in the file, where the next line begins
    jobs: tuple[NewJob, ...]
    error: JobError | None = None


class FeedOutcome(StrEnum):
    OK = "ok"
    PASSED = "passed"  #: the cursor is behind the line: somebody fed it, maybe this very call
    GAP = "gap"  #: the line before was not fed
    AHEAD = "ahead"  #: as many lines are under way as may be
    FULL = "full"  #: the queue limit leaves no room
    TENANT_FULL = "tenant_full"
    CLOSED = "closed"  #: the batch is not in progress
    GONE = "gone"


@dataclass(frozen=True, slots=True)
class FilePage:
    files: tuple[FileRecord, ...]  #: newest first
    more: bool


@dataclass(frozen=True, slots=True)
class BatchPage:
    batches: tuple[BatchRecord, ...]  #: newest first
    more: bool
