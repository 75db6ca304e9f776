"""The job stores under test, with a clock that a test can move: Redis has none, so its stored times are moved instead."""

from dataclasses import replace
from typing import Protocol

import redis

from storage import chain, keys
from storage.audit import audit
from storage.job_store import JobStore
from storage.memory_store import MemoryJobStore
from storage.records import (
    Commit,
    EngineInfo,
    Finish,
    JobRecord,
    JobStatus,
    LogEntry,
    NewJob,
    OwnedJob,
    StepWrites,
    SubmitOutcome,
)
from storage.redis_store import RedisJobStore
from tests.servers import RedisServer

MODEL = "model-a"


class Backend(Protocol):
    name: str

    def client(self) -> JobStore: ...

    def advance(self, seconds: float) -> None: ...

    def leftovers(self) -> list[str]:
        """What the audit finds wrong."""

    def close(self) -> None: ...


class MemoryBackend:
    name = "memory"

    def __init__(self) -> None:
        self.now = 1_800_000_000.0
        self.store = MemoryJobStore(clock=self._clock)

    def _clock(self) -> float:
        self.now += 1e-6
        return self.now

    def client(self) -> JobStore:
        return self.store

    def advance(self, seconds: float) -> None:
        self.now += seconds

    def leftovers(self) -> list[str]:
        return []

    def close(self) -> None:
        pass


class RedisBackend:
    """A flushed server; ``advance`` makes everything in it that much older."""

    def __init__(self, name: str, server: RedisServer) -> None:
        self.name = name
        self.server = server
        self.raw = redis.Redis.from_url(server.url, decode_responses=True)
        self.raw.flushall()
        self._clients: list[RedisJobStore] = []

    def client(self) -> JobStore:
        store = RedisJobStore(self.server.url, single_connection=True)
        self._clients.append(store)
        return store

    def advance(self, seconds: float) -> None:
        pipe = self.raw.pipeline()
        for key in self.raw.scan_iter(keys.JOB + "*"):
            fields = self.raw.hgetall(key)
            for name in ("created_at", "started_at", "finished_at", "deadline_at", "affinity_until", "unfit_since", "read_at"):
                if fields[name]:
                    pipe.hset(key, name, f"{float(fields[name]) - seconds:.6f}")
        for key in (keys.DEADLINES, keys.EXPIRY):
            for member in self.raw.zrange(key, 0, -1):
                pipe.zincrby(key, -seconds, member)
        pipe.execute()

    def leftovers(self) -> list[str]:
        return audit(self.server.url)

    def close(self) -> None:
        for store in self._clients:
            store.close()
        self.raw.close()


def bound(backend: Backend, store_id: str = "store-1") -> JobStore:
    store = backend.client()
    store.bind(store.create(store_id))
    return store


def new_job(job_id: str = "job-1", **values) -> NewJob:
    base = NewJob(job_id, '{"n":1}', tuple(range(10)), MODEL, 100, "hash-1")
    return replace(base, **values)


def engine_info(engine_id: str = "engine-1", **values) -> EngineInfo:
    base = EngineInfo(engine_id, "boot-1", "host-1", 42, f"pool-{engine_id}", MODEL, "demo", 16, 100, 2048)
    return replace(base, **values)


def tokens(*ids: int) -> tuple[LogEntry, ...]:
    return tuple(LogEntry(token, f"<{token}>") for token in ids)


def commit_of(record: JobRecord, *ids: int, fence: int | None = None, finish: Finish | None = None, **values) -> Commit:
    """The commit that comes next for this record."""
    return Commit(
        record.job_id,
        record.fence if fence is None else fence,
        record.log_length,
        chain.extend_all(record.chain, ids),
        tokens(*ids),
        finish,
        **values,
    )


class EngineUnderTest:
    """The storage side of an engine: what it holds, and its last writes, to send them again."""

    def __init__(self, store: JobStore, engine_id: str = "engine-1", incarnation: str = "inc-1", **info) -> None:
        self.store = store
        self.info = engine_info(engine_id, **info)
        self.incarnation = incarnation

    def register(self, incarnation: str | None = None, *, blame: bool = False, seen: tuple[str, int] | None = None):
        self.incarnation = incarnation or self.incarnation
        return self.store.register(self.info, self.incarnation, blame=blame, seen=seen)

    def claim(self, *, held: tuple[str, ...] = (), free_pages: int = 1000, limit: int = 100) -> tuple[OwnedJob, ...]:
        return self.store.claim(self.info.engine_id, self.incarnation, held=held, free_pages=free_pages, limit=limit)

    def write(self, *commits: Commit, **values):
        writes = StepWrites(commits, **values)
        return self.store.write_step(self.info.engine_id, self.incarnation, self.info.pool_id, writes)

    def commit(self, job_id: str, *ids: int, finish: Finish | None = None, **values):
        record = self.store.get(job_id)
        assert record is not None
        return self.write(commit_of(record, *ids, finish=finish, **values)).commits[0]

    def release(self, *jobs: OwnedJob, affinity: bool = False):
        return self.store.release(self.info.engine_id, self.incarnation, jobs, affinity=affinity)

    def renew(self):
        return self.store.renew(self.info.engine_id, self.incarnation)


LIMIT = 1000


def submit(store: JobStore, job_id: str = "job-1", **values) -> None:
    assert store.submit(new_job(job_id, **values), queue_limit=LIMIT).outcome is SubmitOutcome.CREATED


def status_of(store: JobStore, job_id: str = "job-1") -> JobStatus:
    record = store.get(job_id)
    assert record is not None
    return record.status
