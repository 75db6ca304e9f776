"""What was purged goes from Redis's file too: after purges, not too often, whoever asks, and asked again until it is done."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from chaos.processes import wait_until
from storage.errors import StoreMisconfigured, StoreUnavailable
from storage.job_store import JobStore
from tests.servers import RedisServer, running_redis, valkey_binary
from tests.storage.backends import Backend, RedisBackend, bound, submit
from tests.storage.users import OURS, SHIPPED, url_of, write_users
from tests.traces import holding, runs

EVERY = 600.0
CANARY = "QmFuZ2tvay1rYW5hcmllbnZvZ2Vs"


def purge(backend: Backend, store: JobStore, job_id: str = "job-1", **values) -> None:
    submit(store, job_id, **values)
    store.cancel(job_id)
    backend.advance(100)
    assert store.sweep_expired(50) == 1


def wait_for_the_end(backend: Backend) -> None:
    if isinstance(backend, RedisBackend):
        wait_until(lambda: not backend.raw.info("persistence")["aof_rewrite_in_progress"], 60, "the end of the rewrite")


def settle(store: JobStore, backend: Backend) -> None:
    """Until the rewrite has ended and ``store`` took note of it."""
    wait_for_the_end(backend)
    assert not store.rewrite_file(EVERY)


class TestWhoAsksAndWhen:
    @pytest.fixture(autouse=True)
    def no_rewrite_meets_the_next_test(self, backend: Backend) -> Iterator[None]:
        yield
        wait_for_the_end(backend)

    def test_only_after_a_purge(self, backend: Backend, store: JobStore):
        submit(store)
        store.cancel("job-1")
        assert not store.rewrite_file(EVERY)
        backend.advance(100)
        assert store.sweep_expired(50) == 1
        assert store.rewrite_file(EVERY)
        settle(store, backend)
        backend.advance(2 * EVERY)
        assert not store.rewrite_file(EVERY)

    def test_two_apis_ask_once(self, backend: Backend, store: JobStore):
        other = bound(backend)
        purge(backend, store)
        assert [other.rewrite_file(EVERY), store.rewrite_file(EVERY), other.rewrite_file(EVERY)] == [True, False, False]

    def test_purges_that_follow_wait_for_their_time(self, backend: Backend, store: JobStore):
        purge(backend, store)
        assert store.rewrite_file(EVERY)
        settle(store, backend)
        purge(backend, store)
        assert not store.rewrite_file(EVERY)
        backend.advance(EVERY - 150)
        assert not store.rewrite_file(EVERY)
        backend.advance(100)
        assert store.rewrite_file(EVERY)

    def test_a_time_ahead_of_the_clock_is_not_waited_for(self, backend: Backend, store: JobStore):
        purge(backend, store)
        assert store.rewrite_file(EVERY)
        settle(store, backend)
        purge(backend, store)
        backend.advance(-86_400)
        assert store.rewrite_file(EVERY)


class TestUntilItIsDone:
    @pytest.fixture
    def server(self, tmp_path: Path) -> Iterator[RedisServer]:
        with running_redis(valkey_binary(), tmp_path / "redis") as running:
            yield running

    @pytest.fixture
    def backend(self, server: RedisServer) -> Iterator[RedisBackend]:
        made = RedisBackend("own", server)
        yield made
        made.close()

    def test_a_purged_text_is_gone_from_the_directory(self, backend: RedisBackend, server: RedisServer):
        store = bound(backend)
        submit(store, "kept", spec=f'{{"prompt":"{CANARY[::-1]}"}}')
        purge(backend, store, spec=f'{{"prompt":"{CANARY}"}}')
        assert holding(runs(CANARY), server.directory)
        assert store.rewrite_file(EVERY)
        settle(store, backend)
        wait_until(
            lambda: not holding(runs(CANARY), server.directory), 10, "the end of the old file"
        )  # the old file is unlinked beside the server's own work
        assert holding(runs(CANARY[::-1]), server.directory), "what is kept must be found, else nothing could be"

    def test_who_asked_dies_and_another_asks_again(self, backend: RedisBackend):
        first, second = bound(backend), bound(backend)
        purge(backend, first)
        assert first.rewrite_file(EVERY)
        first.close()
        assert not second.rewrite_file(EVERY)
        backend.advance(EVERY)
        wait_for_the_end(backend)
        assert second.rewrite_file(EVERY)
        settle(second, backend)
        backend.advance(EVERY)
        assert not second.rewrite_file(EVERY)

    def test_redis_dies_in_the_middle_and_is_asked_again(self, backend: RedisBackend, server: RedisServer):
        store = bound(backend)
        for i in range(30):
            submit(store, f"job-{i + 2}")
        backend.raw.config_set("rdb-key-save-delay", 100_000)  # 0.1 s for each key: the rewrite lasts until its server is killed
        purge(backend, store)
        assert store.rewrite_file(EVERY)
        assert not store.rewrite_file(EVERY)
        assert backend.raw.info("persistence")["aof_rewrite_in_progress"] == 1
        server.restart()
        for _ in range(3):  # each connection may have to find out
            with contextlib.suppress(StoreUnavailable):
                assert not store.rewrite_file(EVERY)
        backend.advance(EVERY)
        assert store.rewrite_file(EVERY)

    def test_another_rewrite_under_way_is_no_error(self, backend: RedisBackend):
        """It may have begun before the purge, so it does not count as ours."""
        store = bound(backend)
        submit(store, "kept")
        backend.raw.config_set("rdb-key-save-delay", 300_000)
        backend.raw.bgrewriteaof()
        purge(backend, store)
        assert not store.rewrite_file(EVERY)
        wait_for_the_end(backend)
        backend.advance(EVERY)
        assert store.rewrite_file(EVERY)

    def test_a_user_that_may_not_says_so(self, tmp_path: Path):
        users = write_users(tmp_path / "users.acl")
        users.write_text(users.read_text().replace(" +bgrewriteaof", ""))
        assert "bgrewriteaof" in SHIPPED.read_text()
        with running_redis(valkey_binary(), tmp_path / "redis", ("--aclfile", str(users))) as server:
            backend = RedisBackend("few rights", server, url=url_of(server, OURS), operator_url=url_of(server, "operator"))
            store = bound(backend)
            purge(backend, store)
            with pytest.raises(StoreMisconfigured, match="bgrewriteaof"):
                store.rewrite_file(EVERY)
            assert not store.rewrite_file(EVERY)  # nor does it say so every second
            backend.close()
