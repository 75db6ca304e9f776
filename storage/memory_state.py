"""What ``MemoryJobStore`` holds, and the moves that several verbs share: the counterpart of ``lua/jobs.lua``."""

import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from storage.batch_records import BATCH_TRANSITIONS, BatchRecord, BatchStatus, FileRecord
from storage.records import (
    TRANSITIONS,
    EngineInfo,
    EngineRecord,
    JobError,
    JobRecord,
    JobStatus,
    LogEntry,
    OwnedJob,
    PageEntry,
)
from storage.rules import (
    AFFINITY_GRACE,
    CLAIM_CONSIDERED,
    CLAIM_SCAN,
    POISON_MESSAGE,
    POISON_STRIKES,
    RESERVE_AFTER,
    SUSPECT_STRIKES,
    pages_needed,
)

_HINTS_KEPT = 10_000


@dataclass(slots=True)
class Job:
    record: JobRecord
    request_hash: str
    digest: str
    entries: list[LogEntry] = field(default_factory=list)
    charged: int = 0  #: the strike that the last give added, until a commit or the owner's going clears it
    lost: int = 0
    orphan_of: tuple[str, str] | None = None  #: the engine and incarnation that were declared dead with a strike for it
    affinity: str = ""
    affinity_until: float = 0.0
    unfit_since: float | None = None
    released_by: str = ""
    counted: tuple[object, ...] = ()
    read_at: float | None = None
    expires: float = 0.0

    def change(self, **values: Any) -> None:
        status = values.get("status", self.record.status)
        if status is not self.record.status:
            assert status in TRANSITIONS[self.record.status], (self.record.status, status)
        self.record = replace(self.record, **values)

    @property
    def token(self) -> OwnedJob:
        return OwnedJob(self.record.job_id, self.record.fence, self.record.strikes)


@dataclass(slots=True)
class Engine:
    info: EngineInfo
    incarnation: str
    beat: int = 1
    dead: bool = False
    failed: tuple[str, ...] = ()
    ended_well: str = ""  #: the incarnation before, unless it is known to have crashed


@dataclass(slots=True)
class Upload:
    chunks: dict[int, bytes] = field(default_factory=dict)
    at: float = 0.0  #: of the last bytes
    is_file: bool = False

    @property
    def num_bytes(self) -> int:
        return sum(map(len, self.chunks.values()))


@dataclass(slots=True)
class File:
    record: FileRecord
    batches: int = 0
    deleted: bool = False
    expires: float | None = None  #: None once a batch was made of it


@dataclass(slots=True)
class Batch:
    record: BatchRecord
    read_at: float | None = None
    ended_at: float = 0.0
    purged: int | None = None  #: lines purged; None: it is there

    def change(self, now: float, **values: Any) -> None:
        status = values.get("status", self.record.status)
        if status is not self.record.status:
            assert status in BATCH_TRANSITIONS[self.record.status], (self.record.status, status)
            values["reached"] = {**self.record.reached, status: now}
            self.ended_at = now
        self.record = replace(self.record, **values)


class Hints:
    """Who changed, for any number of waiting threads; each sees what came after its own first wait."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._log: deque[tuple[int, str]] = deque(maxlen=_HINTS_KEPT)
        self._number = 0
        self._local = threading.local()

    def publish(self, job_id: str) -> None:
        with self._changed:
            self._number += 1
            self._log.append((self._number, job_id))
            self._changed.notify_all()

    def wait(self, timeout: float) -> frozenset[str]:
        with self._changed:
            seen: int = getattr(self._local, "seen", self._number)
            self._changed.wait_for(lambda: self._number > seen, timeout)
            self._local.seen = self._number
            return frozenset(job_id for number, job_id in self._log if number > seen)


class State:
    """Not thread-safe: the store's lock is held by whoever calls."""

    def __init__(self) -> None:
        self.jobs: dict[str, Job] = {}
        self.keys: dict[str, tuple[str, ...]] = {}  #: digest of tenant and key -> ids of the jobs it made
        self.engines: dict[str, Engine] = {}
        self.pools: dict[str, dict[int, tuple[PageEntry, float]]] = {}  #: pool -> host page -> entry, and when it was published
        self.uploads: dict[str, Upload] = {}
        self.files: dict[str, File] = {}
        self.batches: dict[str, Batch] = {}
        self.beats: dict[str, int] = {}  #: of apis with live jobs that end with them
        self.beat = 0
        self.order = 0
        self.commit = 0
        self.purges = self.purges_rewritten = 0
        self.rewrite_at: float | None = None
        self.now = 0.0
        self.hints = Hints()

    def copy(self) -> "State":
        """As it is now; who waits for hints goes on waiting for the same ones."""
        copy = State()
        copy.jobs = {job_id: replace(job, entries=list(job.entries)) for job_id, job in self.jobs.items()}
        copy.keys, copy.pools = dict(self.keys), {pool: dict(table) for pool, table in self.pools.items()}
        copy.engines = {engine_id: replace(engine) for engine_id, engine in self.engines.items()}
        copy.uploads = {upload_id: replace(upload, chunks=dict(upload.chunks)) for upload_id, upload in self.uploads.items()}
        copy.files = {file_id: replace(file) for file_id, file in self.files.items()}
        copy.batches = {batch_id: replace(batch) for batch_id, batch in self.batches.items()}
        copy.beats, copy.beat = dict(self.beats), self.beat
        copy.order, copy.commit, copy.now, copy.hints = self.order, self.commit, self.now, self.hints
        return copy

    def sorted_jobs(self) -> Iterator[Job]:
        yield from sorted(self.jobs.values(), key=lambda job: job.record.order)

    def owned(self, engine_id: str) -> list[Job]:
        running = JobStatus.IN_PROGRESS
        return [j for j in self.sorted_jobs() if j.record.status is running and j.record.engine_id == engine_id]

    def queue(self, model_fingerprint: str) -> list[Job]:
        waiting = (
            job
            for job in self.jobs.values()
            if job.record.status is JobStatus.QUEUED and job.record.model_fingerprint == model_fingerprint
        )
        return sorted(waiting, key=lambda job: (-job.record.priority, job.record.order))

    def served(self, api: str) -> list[Job]:
        return [job for job in self.jobs.values() if job.record.served_by == api and not job.record.status.terminal]

    def api_beat(self, api: str) -> None:
        self.beat += 1
        self.beats[api] = self.beat

    def alive(self, engine_id: str, incarnation: str) -> bool:
        engine = self.engines.get(engine_id)
        return engine is not None and engine.incarnation == incarnation and not engine.dead

    def engine_record(self, engine: Engine) -> EngineRecord:
        ids = tuple(sorted(job.record.job_id for job in self.owned(engine.info.engine_id)))
        return EngineRecord(engine.info, engine.incarnation, engine.beat, engine.dead, ids)

    # moves -----------------------------------------------------------------------------------------------------------
    def end(self, job: Job, status: JobStatus, reason: str = "", error: JobError | None = None) -> None:
        job.change(status=status, finished_at=self.now, finish_reason=reason, error=error)
        job.expires = self.now
        self.hints.publish(job.record.job_id)
        if not self.served(job.record.served_by):
            self.beats.pop(job.record.served_by, None)
        if job.record.batch:
            self._count_line(job)

    def line_outcome(self, job: Job) -> str | None:
        """How the line ended, of which this is a job: "completed" or "failed", by the jobs that are there; None while one lives."""
        record = job.record
        first = record.group or record.job_id
        siblings = [self.jobs.get(choice_id(first, i)) for i in range(record.choices)]
        statuses = [None if sibling is None else sibling.record.status for sibling in siblings]
        if any(status is not None and not status.terminal for status in statuses):
            return None
        answered = (JobStatus.COMPLETED, JobStatus.INCOMPLETE)
        return "completed" if all(status in answered for status in statuses) else "failed"

    def _count_line(self, job: Job) -> None:
        outcome, batch = self.line_outcome(job), self.batches[job.record.batch]
        if outcome is None:
            return
        batch.change(self.now, **{outcome: getattr(batch.record, outcome) + 1})
        seen = batch.record
        if seen.status is BatchStatus.IN_PROGRESS and seen.completed + seen.failed == seen.total:
            batch.change(self.now, status=BatchStatus.FINALIZING)
            batch.change(self.now, status=BatchStatus.COMPLETED)

    def uncount_line(self, job: Job) -> None:
        """Before an ended job is deleted by itself: its line has no answer any more."""
        batch = self.batches.get(job.record.batch)
        if batch is not None and self.line_outcome(job) == "completed":
            batch.change(self.now, completed=batch.record.completed - 1, failed=batch.record.failed + 1)

    def end_poisoned(self, job: Job) -> None:
        self.end(job, JobStatus.FAILED, error=JobError("poison", POISON_MESSAGE))

    def requeue(self, job: Job) -> None:
        strikes = job.record.strikes - job.charged
        job.charged = 0
        job.change(status=JobStatus.QUEUED, engine_id="", incarnation="", strikes=strikes)
        self.hints.publish(job.record.job_id)

    def release(self, job: Job, engine_id: str, incarnation: str, affinity: bool) -> None:
        job.released_by = incarnation
        job.affinity = engine_id if affinity else ""
        job.affinity_until = self.now + AFFINITY_GRACE
        self.requeue(job)

    def orphan(self, job: Job, suspected: bool = False) -> None:
        job.lost, job.released_by, job.orphan_of = 1, "", None
        if suspected:
            job.charged, job.orphan_of = 0, (job.record.engine_id, job.record.incarnation)
        self.requeue(job)

    def strikes_of(self, job: Job) -> int:
        """Of a queued job: without the last one where its owner came back since and did not say that it had crashed."""
        engine = None if job.orphan_of is None else self.engines.get(job.orphan_of[0])
        forgiven = engine is not None and job.orphan_of is not None and engine.ended_well == job.orphan_of[1]
        return job.record.strikes - int(forgiven)

    def adopt(self, job: Job, incarnation: str, blame: bool) -> None:
        """A new incarnation of the same engine takes the job on."""
        record = job.record
        job.change(incarnation=incarnation, fence=record.fence + 1, recoveries=record.recoveries + 1)
        if blame:
            job.change(strikes=record.strikes + 1)
            job.charged = 1
        self.hints.publish(record.job_id)

    def give(self, job: Job, engine_id: str, incarnation: str) -> OwnedJob:
        record = job.record
        job.change(
            status=JobStatus.IN_PROGRESS,
            engine_id=engine_id,
            incarnation=incarnation,
            fence=record.fence + 1,
            strikes=self.strikes_of(job) + 1,
            recoveries=record.recoveries + job.lost,
            started_at=self.now if record.started_at is None else record.started_at,
        )
        job.charged, job.lost, job.orphan_of, job.released_by, job.affinity, job.unfit_since = 1, 0, None, "", "", None
        self.hints.publish(record.job_id)
        return job.token

    def claim(self, engine: Engine, held: frozenset[str], free: int, limit: int) -> tuple[tuple[OwnedJob, ...], bool]:
        """What is given, and whether anything was written that counts as a commit."""
        given: list[OwnedJob] = []
        owned = self.owned(engine.info.engine_id)
        for job in owned:
            if job.record.job_id not in held and len(given) < limit:
                free -= _pages(job, engine.info)[0]
                given.append(job.token)
        if any(job.record.strikes >= SUSPECT_STRIKES for job in owned):  # nobody may come in before the one whose turn it is
            return tuple(given), False
        seen, blocked, changed = 0, False, False
        for job in self.queue(engine.info.model_fingerprint)[:CLAIM_SCAN]:
            if len(given) >= limit or seen >= CLAIM_CONSIDERED:
                break
            need, total = _pages(job, engine.info)
            in_grace = abs(job.affinity_until - AFFINITY_GRACE - self.now) < AFFINITY_GRACE
            reserved = in_grace and job.affinity not in ("", engine.info.engine_id)
            if reserved or total > engine.info.device_pages:
                continue
            seen += 1
            if self.strikes_of(job) >= POISON_STRIKES:
                self.end_poisoned(job)
                changed = True
            elif need <= free:
                free -= need
                given.append(self.give(job, engine.info.engine_id, engine.incarnation))
                changed = True
            elif not blocked:
                blocked = True
                if job.unfit_since is None:
                    job.unfit_since = self.now
                elif abs(self.now - job.unfit_since) > RESERVE_AFTER:
                    break
        return tuple(given), changed


def choice_id(first: str, i: int) -> str:
    return f"{first}-{i}" if i else first


def _pages(job: Job, info: EngineInfo) -> tuple[int, int]:
    return pages_needed(
        prompt=len(job.record.prompt_token_ids),
        length=job.record.log_length,
        max_tokens=job.record.max_tokens,
        page_size=info.page_size,
        max_context=info.max_context,
    )
