"""The contract of a job store. Two implementations pass one suite: ``RedisJobStore`` and ``MemoryJobStore``.

All calls are synchronous (the api runs them in threads: a cancelled call cannot then leave half a reply in a connection), may be
sent twice with the same arguments, and raise only what ``storage.errors`` names. ``StoreUnavailable`` always means *unknown*.
"""

from collections.abc import Sequence
from typing import Protocol

from storage.batch_store import BatchStore
from storage.records import (
    ApiRecord,
    EngineInfo,
    EngineRecord,
    JobAnswer,
    JobPage,
    JobRecord,
    JobStatus,
    LogRead,
    LogSlice,
    NewJob,
    OwnedJob,
    PageEntry,
    Registered,
    Renewed,
    StepAnswers,
    StepWrites,
    StoreIdentity,
    Submitted,
)
from storage.vitals import VitalsFeed


class JobStore(Protocol):
    # identity (PROTOCOL.md 5) --------------------------------------------------------------------------------------
    def identity(self) -> StoreIdentity | None:
        """The identity in Redis now, or None when the store is empty."""

    def create(self, store_id: str) -> StoreIdentity:
        """Create the store unless one is there; answer with the one that is there."""

    def bind(self, identity: StoreIdentity) -> None:
        """Every later script proves this store id and epoch (else WrongStore).

        New connections prove id, epoch and commit mark; a counter that falls is WrongStore too.
        """

    def raise_epoch(self) -> StoreIdentity:
        """Accept the store as it is: a new epoch voids marks, owners and incarnations; in-progress jobs go back to the queue."""

    # clients -------------------------------------------------------------------------------------------------------
    def submit(self, *jobs: NewJob, queue_limit: int, tenant_limit: int | None = None) -> Submitted:
        """All of them or none: a group, whose jobs differ in id, spec and prompt alone; one job is a group of one.

        An idempotency key names the whole group, and lives as long as the record of its first job. ``queue_limit`` is for the
        queue of the model, ``tenant_limit`` for what the tenant has in all queues.
        """

    def get(self, job_id: str) -> JobRecord | None: ...

    def jobs(
        self,
        *,
        status: JobStatus | None = None,
        tenant: str | None = "",
        limit: int = 20,
        cursor: str | None = None,
        stored: bool = False,
        oldest_first: bool = False,
    ) -> JobPage:
        """Newest first, or ``oldest_first``. ``tenant``: exactly that one; None: all (operators only). ``stored``: only such."""

    def read(self, reads: Sequence[LogRead]) -> list[LogSlice | None]:
        """Many jobs in one round trip; None for a job that is not there."""

    def cancel(self, job_id: str) -> JobRecord | None:
        """Terminal at once in any non-terminal state. The record afterwards; None when there is no such job."""

    def describe(self, job_id: str, metadata: str) -> JobRecord | None:
        """Give the job this metadata (JSON) in place of its own. The record afterwards; None when there is no such job."""

    def delete(self, *job_ids: str) -> int:
        """Remove jobs whole and at once, live ones too; how many were there. A group goes together: its key names all of it."""

    def wait_hint(self, timeout: float, *, tokens: bool = True) -> frozenset[str]:
        """Block until some job changed (ids, maybe stale, maybe none) or ``timeout`` seconds passed.

        ``tokens=False``: tokens alone need not end the wait (the engine's own commits would). Own connection and own subscription
        for each calling thread, which keeps to one value of ``tokens``; what changed before its first call is not seen.
        """

    def queued(self, model_fingerprint: str) -> int: ...

    def counts(self) -> dict[JobStatus, int]:
        """Jobs by status, kept by the scripts."""

    @property
    def batches(self) -> BatchStore:
        """Files and batches."""

    # engines -------------------------------------------------------------------------------------------------------
    def register(self, info: EngineInfo, incarnation: str, *, blame: bool, seen: tuple[str, int] | None = None) -> Registered:
        """Announce a new incarnation and re-own at once what is listed under this engine id (fence + 1).

        ``blame``: the last life ended in a crash that may be a job's fault (adds a strike). ``seen``: the (incarnation, beat) that
        the caller watched for one lease without change, for a record of another boot id. Raises EngineDead.
        """

    def claim(self, engine_id: str, incarnation: str, *, held: Sequence[str], free_pages: int, limit: int) -> tuple[OwnedJob, ...]:
        """First what is listed under this engine but not in ``held``, then the best of the first 32 queued that fit ``free_pages``.

        A job needs ceil((prompt + log length) / page_size) + 1 pages to start, but never more than it can come to need:
        ceil((min(prompt + max_tokens, max_context) - 1) / page_size). Raises EngineDead.
        """

    def write_step(self, engine_id: str, incarnation: str, pool_id: str, writes: StepWrites) -> StepAnswers:
        """One pipeline: the commits, then dropped entries, then published ones. Raises EngineDead."""

    def release(self, engine_id: str, incarnation: str, jobs: Sequence[OwnedJob], *, affinity: bool) -> tuple[JobAnswer, ...]:
        """Drain: back to the queue at the old place, no strike."""

    def renew(self, engine_id: str, incarnation: str) -> Renewed:
        """Raise the beat. Raises EngineDead."""

    def take_over(self, engine_id: str, incarnation: str, beat: int) -> int:
        """Declare dead the engine that was judged by (incarnation, beat), if that is still so; move at most 64 jobs to the queue.

        Answers how many moved. Call again until 0.
        """

    def engines(self) -> list[EngineRecord]: ...

    def pool_table(self, pool_id: str) -> dict[int, PageEntry]: ...

    def fail(self, job_id: str, code: str, message: str) -> JobRecord | None:
        """End a job as failed whatever its owner (``recover --fail``; poison). The record afterwards."""

    # apis (PROTOCOL.md 3) --------------------------------------------------------------------------------------------
    def apis(self) -> list[ApiRecord]:
        """Those with live jobs that end with them. A job that is named was submitted before the beat beside it."""

    def beat(self, api: str) -> None:
        """Say that the api of this incarnation lives. Each submit of a job that ends with it says so, too."""

    # vitals: what is true for a second and kept nowhere ---------------------------------------------------------------
    def publish_vitals(self, text: str) -> int:
        """Tell whoever listens how an engine does; how many listened. Nothing is written, and no store is proved."""

    def vitals(self) -> VitalsFeed:
        """A new listener, to be closed."""

    # sweeps: any process, any time -----------------------------------------------------------------------------------
    def sweep_deadlines(self) -> tuple[str, ...]:
        """Fail at most 64 jobs whose deadline passed (code ``deadline_exceeded``); their ids."""

    def sweep_expired(self, retention_seconds: float, *, limit: int = 100) -> int:
        """Purge whole jobs that ended longer ago than that; refuses (StorageError "clock step?") as PROTOCOL.md 9 says."""

    def rewrite_file(self, interval: float) -> bool:
        """Begin to write the store's file anew, without what was purged since it last was; True when that began.

        At most once in ``interval`` seconds, whoever asks. Call it again and again: only so is it known whether it ended well.
        Raises StorageError where the store does not allow it.
        """

    def close(self) -> None: ...
