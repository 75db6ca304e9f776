"""The Redis store when Redis, the network or an operator does something (PROTOCOL.md 2, 5)."""

import shutil
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import redis

from storage import keys, scripts
from storage.audit import audit
from storage.errors import StorageError, StoreFull, StoreMisconfigured, StoreUnavailable, WrongStore
from storage.records import JobAnswer, JobStatus, LogRead
from storage.redis_store import RedisJobStore
from tests.servers import RedisServer, running_redis, valkey_binary
from tests.storage.backends import EngineUnderTest, RedisBackend, bound, commit_of, line_of, new_job, submit, tokens


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    """A server of its own, to be killed."""
    with running_redis(valkey_binary(), tmp_path / "data") as made:
        yield made


@pytest.fixture
def store(server: RedisServer) -> Iterator[RedisJobStore]:
    made = RedisJobStore(server.url, single_connection=True, timeout=3.0)
    made.bind(made.create("store-1"))
    yield made
    made.close()


def running_job(store: RedisJobStore) -> EngineUnderTest:
    store.submit(new_job(), queue_limit=10)
    engine = EngineUnderTest(store)
    engine.register()
    engine.claim()
    return engine


class TestScripts:
    def test_every_file_is_a_verb(self):
        folder = Path(scripts.__file__).parent / "lua"
        assert {path.stem for path in folder.glob("*.lua")} == {*scripts.VERBS, "store", "base", "batches", "jobs"}

    def test_no_script_spells_a_key(self):
        folder = Path(scripts.__file__).parent / "lua"
        assert not [path.name for path in folder.glob("*.lua") if "midsentence" in path.read_text()]

    def test_they_are_loaded_again_after_a_flush(self, redis_backend: RedisBackend):
        store = bound(redis_backend)
        engine = running_job(store)
        redis_backend.raw.script_flush()
        assert engine.commit("job-1", 1) is JobAnswer.OK
        redis_backend.raw.script_flush()
        assert engine.renew().owned[0].job_id == "job-1"

    def test_a_flush_in_the_middle_of_a_step(self, redis_backend: RedisBackend):
        """Some scripts known, some not: the unknown ones are sent again, in order."""
        store = bound(redis_backend)
        engine = running_job(store)
        redis_backend.raw.script_flush()
        redis_backend.raw.script_load(scripts.script("commit").text)
        step = engine.write(commit_of(store.get("job-1"), 5), drop=(1,))
        assert step.commits == (JobAnswer.OK,)


class TestRestart:
    def test_kill_9_keeps_every_acknowledged_commit(self, server: RedisServer, store: RedisJobStore):
        engine = running_job(store)
        for token in range(50):
            assert engine.commit("job-1", token) is JobAnswer.OK
        server.restart()
        (log,) = store.read([LogRead("job-1")])
        assert log.entries == tokens(*range(50))
        assert audit(server.url) == []
        assert engine.commit("job-1", 50) is JobAnswer.OK

    def test_while_it_is_away_the_outcome_is_unknown_and_the_same_call_settles_it(self, server: RedisServer, store: RedisJobStore):
        engine = running_job(store)
        commit = commit_of(store.get("job-1"), 7)
        server.stop()
        started = time.monotonic()
        with pytest.raises(StoreUnavailable):
            engine.write(commit)  # the bytes are in the socket: it will be executed
        assert time.monotonic() - started < 9
        server.go_on()
        assert engine.write(commit).commits == (JobAnswer.ALREADY,)
        assert store.get("job-1").log_length == 1

    def test_kills_under_load_lose_and_repeat_nothing(self, server: RedisServer, store: RedisJobStore):
        engine = running_job(store)
        done = threading.Event()

        def kill_often() -> None:
            for _ in range(4):
                time.sleep(0.15)
                server.restart()
            done.set()

        killer = threading.Thread(target=kill_often)
        killer.start()
        token, unknown = 0, 0
        record = store.get("job-1")
        while not done.is_set():
            commit = commit_of(record, token)
            while True:
                try:
                    assert engine.write(commit).commits[0].accepted
                    break
                except StoreUnavailable:
                    unknown += 1
                    time.sleep(0.01)
            record = type(record)(**{**_fields(record), "log_length": token + 1, "chain": commit.chain})
            token += 1
        killer.join()
        assert unknown > 0
        (log,) = store.read([LogRead("job-1", limit=100_000)])
        assert [entry.token for entry in log.entries] == list(range(token))
        assert audit(server.url) == []

    def test_a_hint_reader_survives(self, server: RedisServer, store: RedisJobStore):
        assert store.wait_hint(0.01) == frozenset()
        server.restart()
        with pytest.raises(StoreUnavailable):
            store.wait_hint(0.5)
        store.wait_hint(0.01)
        store.submit(new_job(), queue_limit=10)
        assert store.wait_hint(1) == {"job-1"}

    def test_closing_the_store_ends_a_wait_in_another_thread_in_words(self, server: RedisServer, store: RedisJobStore):
        """redis-py then selects on no socket: the TypeError once looked like a bug of the api at every shutdown."""
        ends: list[BaseException] = []

        def wait() -> None:
            try:
                while True:
                    store.wait_hint(0.02)
            except BaseException as error:
                ends.append(error)

        store.wait_hint(0.01)
        thread = threading.Thread(target=wait)
        thread.start()
        time.sleep(0.1)
        store.close()
        thread.join(10)
        assert [type(end) for end in ends] == [StoreUnavailable]


def _fields(record):
    return {name: getattr(record, name) for name in record.__slots__}


class TestSameStore:
    def test_a_store_that_went_back_is_refused_at_the_next_connection(
        self, server: RedisServer, store: RedisJobStore, tmp_path: Path
    ):
        engine = running_job(store)
        old = store.identity()
        shutil.copytree(server.directory, tmp_path / "copy")
        for token in range(3):
            engine.commit("job-1", token)
        server.kill()
        shutil.rmtree(server.directory)
        shutil.copytree(tmp_path / "copy", server.directory)
        server.start()
        with pytest.raises(WrongStore, match=rf"lost commits {old.commit + 1}\.\.{old.commit + 3}"):
            store.get("job-1")
        with pytest.raises(WrongStore):
            engine.renew()
        assert store.identity() == old
        store.bind(old)
        assert store.get("job-1").log_length == 0

    def test_a_store_that_is_gone(self, server: RedisServer, store: RedisJobStore):
        running_job(store)
        server.kill()
        shutil.rmtree(server.directory)
        server.start()
        with pytest.raises(WrongStore, match="gone"):
            store.get("job-1")
        assert store.identity() is None

    def test_a_flushall_is_noticed_on_a_living_connection(self, redis_backend: RedisBackend):
        store = bound(redis_backend)
        engine = running_job(store)
        commit = commit_of(store.get("job-1"), 1)
        redis_backend.raw.flushall()
        for call in (lambda: store.get("job-1"), lambda: engine.write(commit), lambda: store.cancel("job-1"), store.counts):
            with pytest.raises(WrongStore, match="gone"):
                call()
        assert redis_backend.raw.dbsize() == 0

    def test_another_store(self, redis_backend: RedisBackend):
        store = bound(redis_backend)
        redis_backend.raw.hset(keys.STORE, "id", "store-2")
        for call in (lambda: store.get("job-1"), lambda: store.submit(new_job(), queue_limit=1)):
            with pytest.raises(WrongStore, match="store-2"):
                call()


class TestErrors:
    def test_nobody_there(self, tmp_path: Path):
        store = RedisJobStore(f"unix://{tmp_path}/none.sock")
        with pytest.raises(StoreUnavailable):
            store.identity()
        store.close()

    def test_a_url_that_is_none(self):
        with pytest.raises(StoreMisconfigured, match="redis://"):
            RedisJobStore("http://localhost")

    def test_out_of_memory_is_a_pause_and_changes_nothing(self, redis_backend: RedisBackend):
        store = bound(redis_backend)
        engine = running_job(store)
        commit = commit_of(store.get("job-1"), 1)
        redis_backend.raw.config_set("maxmemory", 1)
        try:
            with pytest.raises(StoreFull):
                engine.write(commit)
        finally:
            redis_backend.raw.config_set("maxmemory", 0)
        assert audit(redis_backend.server.url) == []
        assert engine.write(commit).commits == (JobAnswer.OK,)

    def test_submits_stop_at_eighty_percent_while_commits_go_on(self, redis_backend: RedisBackend):
        store = bound(redis_backend)
        engine = running_job(store)
        used = redis_backend.raw.info("memory")["used_memory"]
        redis_backend.raw.config_set("maxmemory", int(used * 1.1))
        late = redis_backend.client()
        late.bind(store.identity())
        try:
            with pytest.raises(StoreFull, match="80 %"):
                late.submit(new_job("job-2"), queue_limit=9)
            with pytest.raises(StoreFull, match="80 %"):
                late.batches.put_chunk("upload", 0, b"x", limit=9)
            with pytest.raises(StoreFull, match="80 %"):
                late.batches.feed("batch-1", [line_of(1)], window=9, queue_limit=9)
            assert engine.commit("job-1", 1) is JobAnswer.OK
        finally:
            redis_backend.raw.config_set("maxmemory", 0)

    def test_a_replica_is_not_ready(self, redis_backend: RedisBackend):
        store = bound(redis_backend)
        engine = running_job(store)
        commit = commit_of(store.get("job-1"), 1)
        redis_backend.raw.replicaof("127.0.0.1", 1)
        try:
            with pytest.raises(StoreUnavailable):
                engine.write(commit)
        finally:
            redis_backend.raw.replicaof("NO", "ONE")
        assert engine.write(commit).commits == (JobAnswer.OK,)

    def test_a_busy_script_is_not_ready(self, server: RedisServer, store: RedisJobStore):
        raw = redis.Redis.from_url(server.url, socket_timeout=30)
        raw.config_set("busy-reply-threshold", 50)

        def block() -> None:
            with pytest.raises(redis.RedisError):
                raw.eval("while true do end", 0)

        blocker = threading.Thread(target=block)
        blocker.start()
        time.sleep(0.3)
        with pytest.raises(StoreUnavailable):
            store.get("job-1")
        other = redis.Redis.from_url(server.url)
        other.script_kill()
        blocker.join()
        raw.close()
        other.close()
        assert store.get("job-1") is None

    def test_a_key_of_the_wrong_type_is_a_named_error(self, redis_backend: RedisBackend):
        store = bound(redis_backend)
        redis_backend.raw.set(keys.job("job-1"), "x")
        with pytest.raises(StorageError, match="WRONGTYPE"):
            store.get("job-1")

    def test_a_flipped_bit_that_leaves_no_text_is_found_and_breaks_no_reply(self, redis_backend: RedisBackend):
        """It was a UnicodeDecodeError in whoever read the job, which ended engine and api, and `verify` too."""
        store = bound(redis_backend)
        engine = running_job(store)
        engine.commit("job-1", 1)
        redis_backend.raw.hset(keys.job("job-1"), "spec", b'{"n":\xa2}')
        assert store.get("job-1").spec == '{"n":\ufffd}'
        assert [finding.where for finding in audit(redis_backend.server.url)] == ["job-1"]

    def test_a_reply_that_is_cut_never_reaches_the_next_caller(self, redis_backend: RedisBackend):
        store = bound(redis_backend)
        engine = running_job(store)
        with _cutting_proxy(redis_backend.server.socket) as (url, cut):
            through = RedisJobStore(url, single_connection=True, timeout=3.0)
            through.bind(store.identity())
            engine.store = through
            commit = commit_of(through.get("job-1"), 9)  # the connection is made: what is cut is the reply
            cut.set()
            with pytest.raises(StoreUnavailable):
                engine.write(commit)
            cut.clear()
            assert through.counts()[JobStatus.IN_PROGRESS] == 1
            assert engine.write(commit).commits == (JobAnswer.ALREADY,)
            through.close()


@contextmanager
def _cutting_proxy(target: str) -> Iterator[tuple[str, threading.Event]]:
    """Forwards to Redis; while the event is set, closes the connection after the first three bytes of each reply."""
    cut, stop = threading.Event(), threading.Event()
    listener = socket.create_server(("127.0.0.1", 0))
    listener.settimeout(0.1)

    def serve(client: socket.socket) -> None:
        with client, socket.socket(socket.AF_UNIX) as server:
            server.connect(target)
            client.settimeout(0.05)
            server.settimeout(0.05)
            while not stop.is_set():
                for source, sink in ((client, server), (server, client)):
                    try:
                        data = source.recv(65536)
                    except TimeoutError:
                        continue
                    except OSError:
                        return
                    if not data:
                        return
                    if source is server and cut.is_set():
                        sink.sendall(data[:3])
                        return
                    sink.sendall(data)

    def accept() -> None:
        while not stop.is_set():
            try:
                client, _ = listener.accept()
            except TimeoutError:
                continue
            thread = threading.Thread(target=serve, args=(client,))
            thread.start()
            threads.append(thread)

    threads = [threading.Thread(target=accept)]
    threads[0].start()
    try:
        yield f"redis://127.0.0.1:{listener.getsockname()[1]}", cut
    finally:
        stop.set()
        for thread in threads:
            thread.join()
        listener.close()


class TestSettings:
    def test_good_ones(self, redis_backend: RedisBackend):
        store = redis_backend.client()
        assert [w for w in store.check_settings() if "maxmemory is not set" not in w] == []
        info = store.server_info()
        assert (info.role, info.aof_enabled, info.loading) == ("master", True, False)
        assert info.name == ("Valkey" if redis_backend.name == "valkey" else "Redis")

    @pytest.mark.parametrize(
        ("setting", "value", "good"),
        [("appendfsync", "everysec", "always"), ("maxmemory-policy", "allkeys-lru", "noeviction"), ("appendonly", "no", "yes")],
    )
    def test_a_weak_one_is_named_with_its_fix(self, redis_backend: RedisBackend, setting: str, value: str, good: str):
        store = redis_backend.client()
        redis_backend.raw.config_set(setting, value)
        try:
            with pytest.raises(StoreMisconfigured, match=f"{setting} is {value}: set it to {good}"):
                store.check_settings()
            assert any(setting in warning for warning in store.check_settings(allow_weak=True))
        finally:
            redis_backend.raw.config_set(setting, good)
            _wait_for_rewrite(redis_backend.raw)

    @pytest.mark.parametrize(("setting", "value", "good"), [("save", "60 1", "empty"), ("aof-load-truncated", "no", "yes")])
    def test_an_unwise_one_is_a_warning(self, redis_backend: RedisBackend, setting: str, value: str, good: str):
        store = redis_backend.client()
        before = redis_backend.raw.config_get(setting)[setting]
        redis_backend.raw.config_set(setting, value)
        try:
            assert any(f"{setting} is {value}: set it to {good}" in warning for warning in store.check_settings())
        finally:
            redis_backend.raw.config_set(setting, before)

    def test_config_forbidden_is_a_warning(self, redis_backend: RedisBackend):
        redis_backend.raw.acl_setuser(
            "limited", enabled=True, passwords=["+pw"], categories=["+@all"], commands=["-config"], keys=["*"]
        )
        try:
            store = RedisJobStore(f"unix://limited:pw@{redis_backend.server.socket}")
            warnings = store.check_settings()
            assert any("cannot read appendfsync" in warning for warning in warnings)
            store.close()
            wrong = RedisJobStore(f"unix://limited:nope@{redis_backend.server.socket}")
            with pytest.raises(StoreMisconfigured, match="credentials"):
                wrong.identity()
            wrong.close()
        finally:
            redis_backend.raw.acl_deluser("limited")

    def test_a_user_with_only_our_keys_and_channels_is_enough(self, redis_backend: RedisBackend):
        redis_backend.raw.acl_setuser(
            "ours", enabled=True, passwords=["+pw"], categories=["+@all", "-@admin", "-@dangerous"], commands=["+info"],
            keys=["midsentence:*"], channels=["midsentence:*"],
        )  # fmt: skip
        try:
            store = RedisJobStore(f"unix://ours:pw@{redis_backend.server.socket}")
            store.bind(store.create("store-1"))
            store.wait_hint(0.01)
            engine = running_job(store)
            assert engine.commit("job-1", 1) is JobAnswer.OK
            assert store.cancel("job-1").status is JobStatus.CANCELLED
            store.close()
        finally:
            redis_backend.raw.acl_deluser("ours")


def _wait_for_rewrite(raw: redis.Redis) -> None:
    """Turning the file on again starts a rewrite; until it is done writes are not in it."""
    until = time.monotonic() + 10
    while time.monotonic() < until:
        info = raw.info("persistence")
        if not info["aof_rewrite_in_progress"] and not info["aof_rewrite_scheduled"]:
            return
        time.sleep(0.02)


def test_no_key_has_a_time_to_live(redis_backend: RedisBackend):
    store = bound(redis_backend)
    engine = running_job(store)
    store.submit(new_job("job-2", idempotency_key="k", deadline_seconds=5), queue_limit=9)
    engine.commit("job-1", 1)
    store.cancel("job-1")
    assert {redis_backend.raw.ttl(key) for key in redis_backend.raw.scan_iter("*")} == {-1}
    assert all(key.startswith("midsentence:{store}:") for key in redis_backend.raw.scan_iter("*"))


def test_an_engine_keeps_no_record_of_jobs_that_it_has_read(redis_backend):
    """Its cache of records once grew by 4 KB with each job, and by the whole prompt with a long one."""
    store = bound(redis_backend)
    for number in range(5):
        submit(store, f"job-{number}")
        assert store.get(f"job-{number}") is not None
        (first,) = store.read([LogRead(f"job-{number}")])
        assert first is not None
    assert len(store._known) == 1
