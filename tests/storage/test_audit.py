"""The audit of Redis finds each kind of damage, once planted, and nothing in a store that only our scripts wrote."""

import threading
from collections.abc import Callable

import pytest
import redis

from storage import keys
from storage.audit import RedisAudit, audit
from storage.findings import Check, Severity
from storage.records import Finish, JobStatus, PageEntry
from storage.wire import Wire
from tests.storage.backends import EngineUnderTest, RedisBackend, bound, line_of, new_batch, submit, upload

DAMAGE, REPAIRABLE = Severity.DAMAGE, Severity.REPAIRABLE
BATCH = f"{keys.BATCH}batch-1"
DIGEST = keys.idempotency_digest("", "k")


def furnished(backend: RedisBackend) -> EngineUnderTest:
    """job-1 runs with three tokens and a key of its own, job-2 waits with a deadline, job-3 is done, job-4 was cancelled."""
    store = bound(backend)
    submit(store, "job-1", idempotency_key="k")
    submit(store, "job-3")
    submit(store, "job-4", tenant="t", stored=True)
    engine = EngineUnderTest(store)
    engine.register()
    engine.claim()
    engine.commit("job-1", 1, 2, 3)
    engine.commit("job-3", 7, finish=Finish(JobStatus.COMPLETED, "stop"))
    store.cancel("job-4")
    submit(store, "job-2", deadline_seconds=3600, priority=7, served_by="api-1")
    engine.write(publish={3: PageEntry("ab" * 16, 17)})
    upload(store)
    new_batch(store)
    store.batches.begin_batch("batch-1", 3, [])
    store.batches.feed("batch-1", [line_of(1), line_of(2)], window=9, queue_limit=99)
    store.cancel("line-batch-1-1")
    return engine


def change_token(raw: redis.Redis) -> None:
    raw.delete(keys.log("job-1"))
    for entry, token in enumerate((1, 9, 3), 1):
        raw.xadd(keys.log("job-1"), {"t": token, "x": f"<{token}>"}, id=f"{entry}-0")


def wrong_type(raw: redis.Redis) -> None:
    raw.delete(keys.EXPIRY)
    raw.set(keys.EXPIRY, "x")


#: name -> (what is done to Redis, severity, check, where, a word of what must be said)
PLANTED: dict[str, tuple[Callable[[redis.Redis], object], Severity, Check, str, str]] = {
    "line counted": (lambda r: r.hset(BATCH, "completed", 1), DAMAGE, Check.BATCH, "batch-1", "1 lines completed and 1 failed"),
    "batch field": (lambda r: r.hdel(BATCH, "fed"), DAMAGE, Check.BATCH, "batch-1", "field 'fed' is missing"),
    "batch alive": (lambda r: r.delete(keys.LIVE_BATCHES), DAMAGE, Check.BATCH, "batch-1", "not listed in live-batches"),
    "batches counted": (lambda r: r.delete(keys.BATCH_COUNTS), DAMAGE, Check.KEY, "batch-counts", "0 live batches are counted"),
    "batch gone": (lambda r: r.delete(BATCH), DAMAGE, Check.KEY, "live-batches", "lists batch-1, which has no record"),
    "batch job": (lambda r: r.delete(f"{keys.BATCH_JOBS}batch-1"), DAMAGE, Check.JOB, "line-batch-1-2", "listed in batch-jobs:"),
    "file used": (lambda r: r.zadd(keys.FILE_EXPIRY, {"file-1": 1}), DAMAGE, Check.BATCH, "file-1", "is listed in file-expiry"),
    "file cut": (lambda r: r.hdel(f"{keys.FILE_BYTES}upload-of-file-1", "1"), DAMAGE, Check.BATCH, "file-1", "its bytes are not"),
    "file listed": (lambda r: r.delete(f"{keys.FILES}"), DAMAGE, Check.BATCH, "file-1", "not listed in files:"),
    "bytes": (
        lambda r: r.hset(f"{keys.FILE_BYTES}u", "0", "x"), REPAIRABLE, Check.KEY, "file-bytes:u", "are the bytes of no file",
    ),
    "hole": (lambda r: r.xdel(keys.log("job-1"), "2-0"), DAMAGE, Check.LOG, "job-1", "entry 2 of its log is missing"),
    "short": (lambda r: r.xdel(keys.log("job-1"), "3-0"), DAMAGE, Check.LOG, "job-1", "entry 3 of its log is missing"),
    "long": (lambda r: r.xadd(keys.log("job-1"), {"t": 4, "x": ""}, id="4-0"), DAMAGE, Check.LOG, "job-1", "holds 4 entries"),
    "no log": (lambda r: r.delete(keys.log("job-3")), DAMAGE, Check.LOG, "job-3", "entry 1 of its log is missing"),
    "token": (change_token, DAMAGE, Check.LOG, "job-1", "chain hash"),
    "prompt": (lambda r: r.hset(keys.job("job-2"), "prompt", "1 2"), DAMAGE, Check.LOG, "job-2", "chain hash"),
    "field": (lambda r: r.hdel(keys.job("job-1"), "fence"), DAMAGE, Check.JOB, "job-1", "field 'fence' is missing"),
    "number": (lambda r: r.hset(keys.job("job-1"), "length", "x"), DAMAGE, Check.JOB, "job-1", "cannot be read"),
    "length": (lambda r: r.hset(keys.job("job-1"), "length", "-1"), DAMAGE, Check.LOG, "job-1", "counts -1"),
    "queue": (lambda r: r.delete(keys.queue("model-a")), DAMAGE, Check.JOB, "job-2", "not listed in queue:model-a"),
    "score": (lambda r: r.zincrby(keys.queue("model-a"), 1, "job-2"), DAMAGE, Check.JOB, "job-2", "has score"),
    "queued twice": (lambda r: r.zadd(keys.queue("other"), {"job-2": 4}), DAMAGE, Check.JOB, "job-2", "listed in queue:other"),
    "deadline": (lambda r: r.delete(keys.DEADLINES), DAMAGE, Check.JOB, "job-2", "not listed in deadlines"),
    "expiry": (lambda r: r.zrem(keys.EXPIRY, "job-3"), DAMAGE, Check.JOB, "job-3", "not listed in expiry"),
    "expires": (lambda r: r.zadd(keys.EXPIRY, {"job-1": 1}), DAMAGE, Check.JOB, "job-1", "listed in expiry"),
    "index": (lambda r: r.zrem(keys.index("all", None), "job-1"), DAMAGE, Check.JOB, "job-1", "not listed in index:all"),
    "tenant": (lambda r: r.delete(keys.index("all", "t")), DAMAGE, Check.JOB, "job-4", "not listed in tenant:t:all"),
    "stored": (lambda r: r.delete(keys.index("stored", "t")), DAMAGE, Check.JOB, "job-4", "not listed in tenant:t:stored"),
    "not stored": (lambda r: r.zadd(keys.index("stored", ""), {"job-1": 1}), DAMAGE, Check.JOB, "job-1", "in tenant::stored"),
    "not owned": (lambda r: r.srem(keys.owned("engine-1"), "job-1"), DAMAGE, Check.JOB, "job-1", "not listed in owned:engine-1"),
    "two owners": (lambda r: r.sadd(keys.owned("engine-2"), "job-1"), DAMAGE, Check.JOB, "job-1", "listed in owned:engine-2"),
    "incarnation": (
        lambda r: r.hset(keys.engine("engine-1"), "incarnation", "x"), DAMAGE, Check.JOB, "job-1", "not the registered one",
    ),
    "queue owner": (lambda r: r.hset(keys.job("job-2"), "engine", "e"), DAMAGE, Check.JOB, "job-2", "is queued and belongs"),
    "ghost": (lambda r: r.zadd(keys.index("all", None), {"job-9": 9}), DAMAGE, Check.KEY, "index:all", "job-9, which has no"),
    "no record": (lambda r: r.delete(keys.job("job-1")), DAMAGE, Check.KEY, "log:job-1", "has no record"),
    "count": (lambda r: r.hincrby(keys.COUNTS, "queued", 1), DAMAGE, Check.KEY, "counts", "3 jobs are counted as queued"),
    "ttl": (lambda r: r.expire(keys.job("job-1"), 1000), DAMAGE, Check.KEY, "job:job-1", "time to live"),
    "type": (wrong_type, DAMAGE, Check.KEY, "expiry", "is a string, should be a zset"),
    "key lost": (lambda r: r.delete(keys.IDEMPOTENCY + DIGEST), DAMAGE, Check.JOB, "job-1", "idempotency key is gone"),
    "key of nobody": (lambda r: r.set(keys.IDEMPOTENCY + "x", "job-9"), REPAIRABLE, Check.KEY, "idempotency:x", "names no job"),
    "stranger": (lambda r: r.set(keys.PREFIX + "new", "x"), REPAIRABLE, Check.KEY, "new", "no key of this version"),
    "engine": (lambda r: r.hdel(keys.engine("engine-1"), "beat"), DAMAGE, Check.ENGINE, "engine-1", "cannot be read"),
    "unlisted": (lambda r: r.srem(keys.ENGINES, "engine-1"), DAMAGE, Check.ENGINE, "engine-1", "not listed"),
    "no engine": (lambda r: r.sadd(keys.ENGINES, "engine-9"), DAMAGE, Check.ENGINE, "engine-9", "has no record"),
    "not served": (lambda r: r.srem(keys.served("api-1"), "job-2"), DAMAGE, Check.JOB, "job-2", "not listed in served:api-1"),
    "served twice": (lambda r: r.sadd(keys.served("api-2"), "job-2"), DAMAGE, Check.JOB, "job-2", "listed in served:api-2"),
    "unwatched": (lambda r: r.delete(keys.APIS), DAMAGE, Check.KEY, "served:api-1", "not listed in apis"),
    "idle api": (lambda r: r.hset(keys.APIS, "api-9", 1), DAMAGE, Check.KEY, "apis", "api-9, with which no job ends"),
    "pool": (lambda r: r.hset(keys.pool("old"), "1", "ab 1"), REPAIRABLE, Check.POOL, "pool:old", "no engine has"),
}  # fmt: skip


@pytest.mark.parametrize("name", PLANTED)
def test_what_is_planted_is_found(redis_backend: RedisBackend, name: str):
    furnished(redis_backend)
    assert audit(redis_backend.server.url) == []
    plant, severity, check, where, says = PLANTED[name]
    plant(redis_backend.raw)
    found = audit(redis_backend.server.url)
    assert [f for f in found if (f.severity, f.check, f.where) == (severity, check, where) and says in f.what], found


def test_every_key_name_has_a_type():
    """A new kind of key without one would be reported as a stranger's in every installation."""
    names = {value for value in vars(keys).values() if isinstance(value, str) and value.startswith(keys.PREFIX)}
    assert names - {keys.PREFIX, keys.HINTS, keys.TOKEN_HINTS, keys.VITALS} == keys.TYPES.keys()


def test_it_counts_what_it_looked_at(redis_backend: RedisBackend):
    furnished(redis_backend)
    wire = Wire(redis_backend.server.url, connections=1, timeout=5, client_name="")
    looked = RedisAudit(wire, live=False)
    assert list(looked.findings()) == []
    wire.close()
    assert looked.checked == {"jobs": 6, "tokens": 4, "keys": len(redis_backend.raw.keys("*"))}


def test_long_logs_are_read_in_parts(redis_backend: RedisBackend, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("storage.audit._ENTRIES", 2)
    engine = furnished(redis_backend)
    engine.commit("job-1", *range(10))
    assert audit(redis_backend.server.url) == []
    redis_backend.raw.xdel(keys.log("job-1"), "11-0")
    assert [f.what.split(";")[0] for f in audit(redis_backend.server.url)] == ["entry 11 of its log is missing"]


def test_a_service_that_writes_meanwhile_is_no_damage_and_real_damage_is_found_beside_it(redis_backend: RedisBackend):
    engine = furnished(redis_backend)
    store, done = engine.store, threading.Event()

    def work() -> None:
        number = 0
        while not done.is_set():
            job_id = f"busy-{number}"
            submit(store, job_id, deadline_seconds=60, idempotency_key=job_id if number % 3 else None)
            engine.claim(held=("job-1", "job-2"))
            engine.commit(job_id, 1, 2)
            engine.commit(job_id, 3, finish=Finish(JobStatus.COMPLETED, "stop"))
            if number % 3 == 0:  # those without a key can go at once
                assert store._session.run("purge", job_id, "0")[0] == "OK"
            number += 1

    worker = threading.Thread(target=work)
    worker.start()
    wire = Wire(redis_backend.server.url, connections=1, timeout=5, client_name="")
    try:
        for _ in range(20):
            assert list(RedisAudit(wire, live=True).findings()) == []
        redis_backend.raw.xdel(keys.log("job-1"), "2-0")
        (found,) = RedisAudit(wire, live=True).findings()
        assert found.where == "job-1"
    finally:
        done.set()
        worker.join()
        wire.close()
