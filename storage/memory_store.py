"""``MemoryJobStore``: the job store without Redis. Same verbs, same answers, same order of checks; nothing survives it.

For tests of everything above storage/, and the model that the scripts are held against. One lock makes each call atomic, as one
script is. The reasons for the rules stand in ``lua/``. Its fsync boundary, ``sync`` and ``crash``, is Redis's under ``appendfsync
everysec``; a test that calls neither has ``always``.
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from storage.errors import EngineDead, WrongStore
from storage.memory_batches import MemoryBatchStore
from storage.memory_state import Engine, State
from storage.memory_verbs import commit_job, purge_job, refusal, release_job, remove_job, rewrite_file, submit_group
from storage.records import (
    ApiRecord,
    EngineInfo,
    EngineRecord,
    JobAnswer,
    JobError,
    JobPage,
    JobRecord,
    JobStatus,
    LogRead,
    LogSlice,
    NewJob,
    OwnedJob,
    PageEntry,
    Registered,
    RegisterOutcome,
    Renewed,
    StepAnswers,
    StepWrites,
    StoreIdentity,
    Submitted,
)
from storage.rules import (
    DEADLINE_MESSAGE,
    MOVED_PER_CALL,
    POISON_STRIKES,
    SUSPECT_STRIKES,
    check_commit,
    check_group,
    check_sweep,
    parse_cursor,
)
from storage.store_file import describe_wrong_store
from storage.vitals import MemoryVitals, VitalsFeed


class MemoryJobStore:
    """``clock`` gives the store's time, seconds since the epoch."""

    def __init__(self, *, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._lock = threading.RLock()
        self._state = State()
        self._vitals = MemoryVitals()
        self._synced: tuple[State, tuple[str, int] | None] = State(), None  #: what is on disk: state, and the next line
        self._store: tuple[str, int] | None = None  #: id, epoch
        self._bound: StoreIdentity | None = None
        self.batches = MemoryBatchStore(self._script)

    @contextmanager
    def _script(self) -> Iterator[State]:
        with self._lock:
            if self._bound is None:
                raise WrongStore("no store was chosen yet", "call bind() with the identity that was judged")
            if self._store != (self._bound.store_id, self._bound.epoch):
                raise describe_wrong_store(self._bound, self.identity())
            self._state.now = self._clock()
            yield self._state

    @contextmanager
    def _engine_script(self, engine_id: str, incarnation: str, pool_id: str | None = None) -> Iterator[State]:
        with self._script() as state:
            alive = state.alive(engine_id, incarnation)
            if not alive or (pool_id is not None and state.engines[engine_id].info.pool_id != pool_id):
                raise EngineDead(f"engine {engine_id} was declared dead as incarnation {incarnation}")
            yield state

    # disk ------------------------------------------------------------------------------------------------------------
    def sync(self) -> None:
        """What was written until now survives a crash."""
        with self._lock:
            self._synced = self._state.copy(), self._store

    def crash(self) -> None:
        """As Redis comes back: with what was synced, and nothing later."""
        with self._lock:
            state, self._store = self._synced
            self._state = state.copy()

    # identity --------------------------------------------------------------------------------------------------------
    def identity(self) -> StoreIdentity | None:
        with self._lock:
            return None if self._store is None else StoreIdentity(*self._store, self._state.commit)

    def create(self, store_id: str) -> StoreIdentity:
        with self._lock:
            self._store = self._store or (store_id, 1)
            return StoreIdentity(*self._store, self._state.commit)

    def bind(self, identity: StoreIdentity) -> None:
        with self._lock:
            self._bound = identity

    def raise_epoch(self) -> StoreIdentity:
        with self._lock:
            if self._store is None:
                raise WrongStore("there is no store here")
            state = self._state
            state.now = self._clock()
            self._store = (self._store[0], self._store[1] + 1)
            for engine in state.engines.values():
                engine.dead = True
            for job in list(state.sorted_jobs()):
                if job.record.status is JobStatus.IN_PROGRESS:
                    state.orphan(job)
            state.commit += 1
            return StoreIdentity(*self._store, state.commit)

    # clients ---------------------------------------------------------------------------------------------------------
    def submit(self, *jobs: NewJob, queue_limit: int, tenant_limit: int | None = None) -> Submitted:
        check_group(jobs)
        with self._script() as state:
            return submit_group(state, jobs, queue_limit, tenant_limit)

    def get(self, job_id: str) -> JobRecord | None:
        with self._script() as state:
            return state.jobs[job_id].record if job_id in state.jobs else None

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
        after = None if cursor is None else parse_cursor(cursor)
        with self._script() as state:
            found = [
                job.record
                for job in (state.sorted_jobs() if oldest_first else reversed(list(state.sorted_jobs())))
                if (after is None or (job.record.order > after if oldest_first else job.record.order < after))
                and (status is None or job.record.status is status)
                and (job.record.stored or not stored)
                and (tenant is None or job.record.tenant == tenant)
            ]
        page = found[:limit]
        return JobPage(tuple(page), str(page[-1].order) if page and len(found) > limit else None)

    def read(self, reads: Sequence[LogRead]) -> list[LogSlice | None]:
        slices: list[LogSlice | None] = []
        with self._script() as state:
            for read in reads:
                job = state.jobs.get(read.job_id)
                if job is None:
                    slices.append(None)
                    continue
                if job.record.status.terminal:
                    job.read_at = state.now
                entries = tuple(job.entries[read.after : read.after + read.limit])
                slices.append(LogSlice(job.record, read.after, entries))
        return slices

    def cancel(self, job_id: str) -> JobRecord | None:
        return self._end(job_id, JobStatus.CANCELLED, None)

    def describe(self, job_id: str, metadata: str) -> JobRecord | None:
        with self._script() as state:
            job = state.jobs.get(job_id)
            if job is None:
                return None
            if job.record.metadata != metadata:
                job.change(metadata=metadata)
                state.commit += 1
            return job.record

    def fail(self, job_id: str, code: str, message: str) -> JobRecord | None:
        return self._end(job_id, JobStatus.FAILED, JobError(code, message))

    def delete(self, *job_ids: str) -> int:
        with self._script() as state:
            found = [state.jobs[job_id] for job_id in dict.fromkeys(job_ids) if job_id in state.jobs]
            for job in found:
                if not job.record.status.terminal:
                    state.end(job, JobStatus.CANCELLED)
                state.uncount_line(job)
                remove_job(state, job)
            state.commit += bool(found)
            return len(found)

    def _end(self, job_id: str, status: JobStatus, error: JobError | None) -> JobRecord | None:
        with self._script() as state:
            job = state.jobs.get(job_id)
            if job is None:
                return None
            if not job.record.status.terminal:
                state.end(job, status, error=error)
                state.commit += 1
            return job.record

    def wait_hint(self, timeout: float, *, tokens: bool = True) -> frozenset[str]:
        return self._state.hints.wait(timeout)

    def queued(self, model_fingerprint: str) -> int:
        with self._script() as state:
            return len(state.queue(model_fingerprint))

    def counts(self) -> dict[JobStatus, int]:
        with self._script() as state:
            statuses = [job.record.status for job in state.jobs.values()]
            return {status: statuses.count(status) for status in JobStatus}

    # engines ---------------------------------------------------------------------------------------------------------
    def register(self, info: EngineInfo, incarnation: str, *, blame: bool, seen: tuple[str, int] | None = None) -> Registered:
        with self._script() as state:
            old = state.engines.get(info.engine_id)
            owned = state.owned(info.engine_id)
            if old is not None and old.incarnation == incarnation:
                if old.dead:
                    raise EngineDead(f"engine {info.engine_id} was declared dead as incarnation {incarnation}")
                return Registered(RegisterOutcome.REGISTERED, tuple(job.token for job in owned), old.failed)
            refused = refusal(old, owned, info, seen)
            if refused is not None and old is not None:
                return Registered(refused, holder=state.engine_record(old))
            failed: list[str] = []
            for job in owned:
                if blame and job.record.strikes >= POISON_STRIKES and not failed:
                    state.end_poisoned(job)
                    failed.append(job.record.job_id)
                else:
                    state.adopt(job, incarnation, blame)
            state.engines[info.engine_id] = Engine(
                info, incarnation, failed=tuple(failed), ended_well="" if blame or old is None else old.incarnation
            )
            if old is not None and old.info.pool_id != info.pool_id:
                state.pools.pop(old.info.pool_id, None)
            state.commit += 1
            tokens = tuple(job.token for job in state.owned(info.engine_id))
            return Registered(RegisterOutcome.REGISTERED, tokens, tuple(failed))

    def claim(self, engine_id: str, incarnation: str, *, held: Sequence[str], free_pages: int, limit: int) -> tuple[OwnedJob, ...]:
        with self._engine_script(engine_id, incarnation) as state:
            given, changed = state.claim(state.engines[engine_id], frozenset(held), free_pages, limit)
            state.commit += int(changed)
            return given

    def write_step(self, engine_id: str, incarnation: str, pool_id: str, writes: StepWrites) -> StepAnswers:
        for commit in writes.commits:
            check_commit(commit)
        answers: list[JobAnswer] = []
        for commit in writes.commits:
            with self._engine_script(engine_id, incarnation) as state:
                answers.append(commit_job(state, incarnation, commit))
                state.commit += int(answers[-1] is JobAnswer.OK)
        if writes.drop or writes.publish:
            with self._engine_script(engine_id, incarnation, pool_id) as state:
                table = state.pools.setdefault(pool_id, {})
                for page in writes.drop:
                    table.pop(page, None)
                table.update((page, (entry, state.now)) for page, entry in writes.publish.items())
                state.commit += bool(writes.drop) + bool(writes.publish)
        with self._lock:
            return StepAnswers(tuple(answers), self._state.commit)

    def release(self, engine_id: str, incarnation: str, jobs: Sequence[OwnedJob], *, affinity: bool) -> tuple[JobAnswer, ...]:
        answers: list[JobAnswer] = []
        for owned in jobs:
            with self._engine_script(engine_id, incarnation) as state:
                answers.append(release_job(state, engine_id, incarnation, owned, affinity))
                state.commit += int(answers[-1] is JobAnswer.OK)
        return tuple(answers)

    def renew(self, engine_id: str, incarnation: str) -> Renewed:
        with self._engine_script(engine_id, incarnation) as state:
            state.engines[engine_id].beat += 1
            return Renewed(tuple(job.token for job in state.owned(engine_id)), state.now, state.commit)

    def take_over(self, engine_id: str, incarnation: str, beat: int) -> int:
        with self._script() as state:
            engine = state.engines.get(engine_id)
            if engine is None or (engine.incarnation, engine.beat) != (incarnation, beat):
                return 0
            owned = state.owned(engine_id)
            suspects = [job for job in owned if job.record.strikes >= SUSPECT_STRIKES]
            guilty = [] if engine.dead else suspects[:1]
            moved = (guilty + [job for job in owned if job not in guilty])[:MOVED_PER_CALL]
            if moved or not engine.dead:
                engine.dead = True
                state.commit += 1
            for job in moved:
                state.orphan(job, suspected=bool(job.charged) and (job in guilty or job not in suspects))
            return len(moved)

    def engines(self) -> list[EngineRecord]:
        with self._script() as state:
            return [state.engine_record(engine) for _, engine in sorted(state.engines.items())]

    def pool_table(self, pool_id: str) -> dict[int, PageEntry]:
        with self._script() as state:
            table = state.pools.get(pool_id, {})
            return {page: replace(entry, age=max(0.0, state.now - at)) for page, (entry, at) in table.items()}

    # apis ------------------------------------------------------------------------------------------------------------
    def apis(self) -> list[ApiRecord]:
        with self._script() as state:
            served = ((api, tuple(sorted(job.record.job_id for job in state.served(api)))) for api in sorted(state.beats))
            return [ApiRecord(api, state.beats[api], job_ids) for api, job_ids in served]

    def beat(self, api: str) -> None:
        with self._script() as state:
            if api in state.beats:
                state.api_beat(api)

    # vitals ----------------------------------------------------------------------------------------------------------
    def publish_vitals(self, text: str) -> int:
        return self._vitals.publish(text)

    def vitals(self) -> VitalsFeed:
        return self._vitals.feed()

    # sweeps ----------------------------------------------------------------------------------------------------------
    def sweep_deadlines(self) -> tuple[str, ...]:
        with self._script() as state:
            due = sorted(
                (job.record.deadline_at, job.record.job_id)
                for job in state.jobs.values()
                if not job.record.status.terminal and (job.record.deadline_at or state.now + 1) <= state.now
            )[:MOVED_PER_CALL]
            for _, job_id in due:
                state.end(state.jobs[job_id], JobStatus.FAILED, error=JobError("deadline_exceeded", DEADLINE_MESSAGE))
            state.commit += bool(due)
            return tuple(job_id for _, job_id in due)

    def sweep_expired(self, retention_seconds: float, *, limit: int = 100) -> int:
        with self._script() as state:
            finished = [job for job in state.jobs.values() if job.record.status.terminal and not job.record.batch]
            due = sorted(
                (job for job in finished if job.expires <= state.now - retention_seconds),
                key=lambda job: (job.expires, job.record.job_id),
            )
            check_sweep(due=len(due), finished=len(finished), limit=limit)
            return sum(purge_job(state, job, retention_seconds) for job in due[:limit])

    def rewrite_file(self, interval: float) -> bool:
        with self._script() as state:
            return rewrite_file(state, interval)

    def close(self) -> None:
        """Nothing to close."""
