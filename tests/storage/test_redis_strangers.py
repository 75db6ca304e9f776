"""A Redis that somebody else also uses, or that is another one than a moment ago: refused in words, and nobody's token changes."""

from collections.abc import Callable
from pathlib import Path

import pytest
import redis

from service.worker.watch import Watch
from storage import keys
from storage.audit import audit
from storage.errors import StorageError, StoreUnavailable
from storage.job_store import JobStore
from storage.records import Finish, JobStatus, LogRead, PageEntry
from storage.redis_store import RedisJobStore
from tests.servers import running_redis, valkey_binary
from tests.storage.backends import EngineUnderTest, RedisBackend, bound, commit_of, submit

#: Every key of a store with a running and a queued job.
KEYS = [
    keys.STORE, keys.job("job-1"), keys.log("job-1"), keys.queue("model-a"), keys.ENGINES, keys.engine("engine-1"),
    keys.owned("engine-1"), keys.pool("pool-engine-1"), keys.IDEMPOTENCY + keys.idempotency_digest("", "k"),
    *(keys.index(status, tenant) for status in ("all", "queued", "in_progress") for tenant in (None, "")),
    keys.COUNTS, keys.DEADLINES,
]  # fmt: skip


def busy_store(backend: RedisBackend) -> tuple[JobStore, EngineUnderTest]:
    store = bound(backend)
    submit(store, "job-1")
    submit(store, "job-2", idempotency_key="k", deadline_seconds=100.0)
    engine = EngineUnderTest(store)
    engine.register()
    engine.claim(limit=1)
    engine.commit("job-1", 1)
    engine.write(publish={1: PageEntry("aa", 5)})
    return store, engine


def writes(store: JobStore, engine: EngineUnderTest) -> dict[str, Callable[[], object]]:
    """Every verb that writes, as engines and apis call it; those that end a job or a life come last."""
    record = store.get("job-1")
    assert record is not None
    (held,) = engine.renew().owned
    return {
        "renew": engine.renew,
        "submit": lambda: submit(store, "job-3", deadline_seconds=3.0),
        "claim": lambda: engine.claim(held=("job-1",)),
        "publish": lambda: engine.write(publish={2: PageEntry("bb", 6)}),
        "commit": lambda: engine.write(commit_of(record, 2)),
        "release": lambda: engine.release(held),
        "finish": lambda: engine.write(commit_of(record, 2, finish=Finish(JobStatus.COMPLETED, "stop"))),
        "cancel": lambda: store.cancel("job-1"),
        "fail": lambda: store.fail("job-2", "code", "message"),
        "register": lambda: store.register(engine.info, "next", blame=False),
    }


def test_these_are_all_keys(redis_backend: RedisBackend):
    busy_store(redis_backend)
    assert set(redis_backend.raw.scan_iter("*")) == {*KEYS, keys.job("job-2")}


@pytest.mark.parametrize("planted", KEYS, ids=lambda key: key.removeprefix(keys.PREFIX))
def test_a_key_of_another_type_is_named_and_no_token_is_lost(redis_backend: RedisBackend, planted: str):
    """Nothing of ours makes one. A script may stop in the middle on it, which is why the audit must not be content."""
    store, engine = busy_store(redis_backend)
    calls = writes(store, engine)
    redis_backend.raw.delete(planted)
    redis_backend.raw.lpush(planted, "of somebody else")
    errors = []
    for call in calls.values():
        try:
            call()
        except StorageError as error:
            errors.append(error)
    assert any("WRONGTYPE" in str(error) for error in errors) or planted.startswith((keys.IDEMPOTENCY, keys.POOL))
    assert any("is a list, should be" in finding.what for finding in audit(redis_backend.server.url))
    assert redis_backend.raw.lrange(planted, 0, -1) == ["of somebody else"]
    if planted not in (keys.log("job-1"), keys.STORE, keys.job("job-1")):
        (piece,) = store.read([LogRead("job-1")])
        assert [entry.token for entry in piece.entries] in ([1], [1, 2])


def test_a_replica_takes_no_write_and_is_a_pause(redis_backend: RedisBackend):
    store, engine = busy_store(redis_backend)
    calls = writes(store, engine)
    before = {key: redis_backend.raw.type(key) for key in KEYS}, store.counts(), store.read([LogRead("job-1")])
    redis_backend.raw.replicaof("127.0.0.1", 1)
    try:
        for call in calls.values():
            with pytest.raises(StoreUnavailable):
                call()
    finally:
        redis_backend.raw.replicaof("NO", "ONE")
    assert ({key: redis_backend.raw.type(key) for key in KEYS}, store.counts(), store.read([LogRead("job-1")])) == before
    assert audit(redis_backend.server.url) == []
    for call in calls.values():  # what was sent then is sent again, and does what it would have done
        call()
    assert audit(redis_backend.server.url) == []


def test_a_redis_that_is_started_again_between_two_looks_declares_nobody_dead(tmp_path: Path):
    """Each time it has another run id, and everybody connects anew."""
    seconds = iter(range(1000))
    with running_redis(valkey_binary(), tmp_path / "data") as server:
        store, watching = (RedisJobStore(server.url, single_connection=True) for _ in range(2))
        identity = store.create("store-1")
        store.bind(identity)
        watching.bind(identity)
        engines = [EngineUnderTest(store, engine_id) for engine_id in ("living", "dead")]
        for engine in engines:
            engine.register()
        watch = Watch(watching, "watcher", 6.0, on_change=lambda: None, clock=lambda: float(next(seconds)))

        def dead() -> list[str]:
            return [engine.info.engine_id for engine in store.engines() if engine.dead]

        run_ids = set()
        for look in range(12):
            if look % 2:
                server.restart()
            with redis.Redis.from_url(server.url) as client:
                run_ids.add(client.info("server")["run_id"])
            engines[0].renew()
            if look < 6:
                engines[1].renew()
            watch.look()
            assert "living" not in dead()
        assert len(run_ids) == 7
        for _ in range(7):
            engines[0].renew()
            watch.look()
        assert dead() == ["dead"]
        store.close()
        watching.close()
