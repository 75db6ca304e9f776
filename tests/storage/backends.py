"""The job stores under test, with a clock that a test can move: Redis has none, so its stored times are moved instead."""

from dataclasses import replace
from typing import Protocol

import redis

from storage import chain, keys
from storage.audit import audit
from storage.batch_records import ChunkOutcome, CreatedBatch, CreatedFile, FedLine, NewBatch, NewFile
from storage.job_store import JobStore
from storage.memory_store import MemoryJobStore
from storage.records import (
    Commit,
    EngineInfo,
    Finish,
    JobError,
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

    def __init__(self, name: str, server: RedisServer, *, url: str = "", operator_url: str = "") -> None:
        """``url`` and ``operator_url``: for a server with users, what the product connects with, and what the test does."""
        self.name = name
        self.server = server
        self.url = url or server.url
        self.operator_url = operator_url or server.url
        self.raw = redis.Redis.from_url(self.operator_url, decode_responses=True)
        self.raw.flushall()
        self._clients: list[RedisJobStore] = []

    def client(self) -> JobStore:
        store = RedisJobStore(self.url, single_connection=True)
        self._clients.append(store)
        return store

    def advance(self, seconds: float) -> None:
        pipe = self.raw.pipeline()
        for key in self.raw.scan_iter(keys.JOB + "*"):
            fields = self.raw.hgetall(key)
            for name in ("created_at", "started_at", "finished_at", "deadline_at", "affinity_until", "unfit_since", "read_at"):
                if fields[name]:
                    pipe.hset(key, name, f"{float(fields[name]) - seconds:.6f}")
        if rewrite_at := self.raw.hget(keys.STORE, "rewrite_at"):
            pipe.hset(keys.STORE, "rewrite_at", f"{float(rewrite_at) - seconds:.6f}")
        for key in self.raw.scan_iter(keys.POOL + "*"):
            for page, text in self.raw.hgetall(key).items():
                identity, checksum, published_at = text.split(" ")
                pipe.hset(key, page, f"{identity} {checksum} {float(published_at) - seconds:.6f}")
        for key in self.raw.scan_iter(keys.FILE + "*"):
            pipe.hset(key, "created_at", f"{float(self.raw.hget(key, 'created_at')) - seconds:.6f}")
        for key in self.raw.scan_iter(keys.BATCH + "*"):
            for name, value in self.raw.hgetall(key).items():
                if name.endswith("_at") and value:
                    pipe.hset(key, name, f"{float(value) - seconds:.6f}")
        for key in (keys.DEADLINES, keys.EXPIRY, keys.UPLOADS, keys.FILE_EXPIRY, keys.BATCH_EXPIRY):
            for member in self.raw.zrange(key, 0, -1):
                pipe.zincrby(key, -seconds, member)
        pipe.execute()

    def leftovers(self) -> list[str]:
        return list(map(str, audit(self.url)))

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
FILE_ROOM = 1 << 30


def upload(store: JobStore, file_id: str = "file-1", content: bytes = b"one\ntwo\n", upload_id: str = "", **values) -> CreatedFile:
    """A whole upload, in chunks of five bytes."""
    upload_id = upload_id or f"upload-of-{file_id}"
    chunks = [content[at : at + 5] for at in range(0, len(content), 5)]
    for number, chunk in enumerate(chunks):
        assert store.batches.put_chunk(upload_id, number, chunk, limit=FILE_ROOM) is ChunkOutcome.OK
    new = NewFile(file_id, upload_id, len(chunks), len(content), "sha", "in.jsonl", **values)
    return store.batches.create_file(new, limit=100)


def new_batch(store: JobStore, batch_id: str = "batch-1", file_id: str = "file-1", *, limit: int = 100, **values) -> CreatedBatch:
    batch = NewBatch(batch_id, file_id, f"line-{batch_id}-", "/v1/completions", 86_400.0, "hash")
    return store.batches.create_batch(replace(batch, **values), limit=limit)


def line_of(number: int, *, batch_id: str = "batch-1", choices: int = 1, error: JobError | None = None, **values) -> FedLine:
    first = f"line-{batch_id}-{number}"
    group = first if choices > 1 else ""
    ids = [f"{first}-{i}" if i else first for i in range(choices)]
    jobs = tuple(new_job(i, batch=batch_id, choices=choices, group=group, **values) for i in ids)
    return FedLine(number, 10 * number, jobs, error)


def submit(store: JobStore, job_id: str = "job-1", **values) -> None:
    assert store.submit(new_job(job_id, **values), queue_limit=LIMIT).outcome is SubmitOutcome.CREATED


def status_of(store: JobStore, job_id: str = "job-1") -> JobStatus:
    record = store.get(job_id)
    assert record is not None
    return record.status
