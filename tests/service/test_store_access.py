"""Opening the store: joining, going on, refusing a Redis that is empty, foreign, rolled back or set up to lose things."""

import os
import subprocess
import sys
import threading
import time

import pytest
import redis

from service.errors import Stopped
from service.redis_server import EmbeddedRedis
from service.settings import Settings
from service.store_access import MarkWriter, StoreOpener, decisive_mark, open_store
from storage.errors import StoreMisconfigured, StoreUnavailable, WrongStore
from storage.records import StoreIdentity
from storage.store_file import StoreFile, load_store_file


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    running = EmbeddedRedis(tmp_path_factory.mktemp("redis"))
    running.start_or_attach(timeout=10)
    yield running
    running.kill()


@pytest.fixture
def url(server):
    with redis.Redis.from_url(server.url) as client:
        client.flushall()
    return server.url


@pytest.fixture
def settings(tmp_path, url):
    return Settings(data_dir=tmp_path / "data", redis_url=url)


@pytest.fixture
def opened():
    """Opens as a process would; everything is closed with the test."""
    stores = []

    def make(settings, role):
        stores.append(open_store(settings, role=role))
        return stores[-1]

    yield make
    for each in stores:
        each.mark.flush()
        each.store.close()


def raw(settings):
    return redis.Redis.from_url(settings.redis_url)


def set_commit(settings, commit):
    """As if Redis had come this far, or had lost what came after."""
    from storage import keys

    with raw(settings) as client:
        client.hset(keys.STORE, "commit", commit)


def test_engine_and_api_of_one_directory_join_one_store(settings, opened):
    engine, api = opened(settings, "engine"), opened(settings, "api")
    assert engine.store.identity() == api.store.identity()
    assert engine.engine_id.startswith("engine-")
    assert api.engine_id == ""
    assert (settings.data_dir / "store.json").stat().st_mode & 0o777 == 0o600
    again = opened(settings, "engine")
    assert again.engine_id == engine.engine_id


@pytest.mark.parametrize("role", ["engine", "api"])
def test_an_emptied_redis_is_refused_by_both(settings, opened, role):
    """Also by the one that has no mark of its own: the directory as a whole belongs to one store."""
    opened(settings, "engine")
    with raw(settings) as client:
        client.flushall()
    with pytest.raises(WrongStore, match="is gone: Redis is empty"):
        opened(settings, role)
    with raw(settings) as client:
        assert client.dbsize() == 0  # and nothing was made of it


def test_lost_commits_are_refused_and_numbered(settings, opened):
    engine = opened(settings, "engine")
    engine.mark.update(1000)
    engine.mark.flush()
    set_commit(settings, 990)
    with pytest.raises(WrongStore, match=r"Redis lost commits 991\.\.1000"):
        opened(settings, "engine")
    weak = settings.model_copy(update={"allow_weak_durability": True})
    assert opened(weak, "engine").mark.file.commit == 990


def test_a_store_that_a_person_accepted_voids_the_apis_mark(settings, opened):
    """``recover --accept-store`` writes the engine's file; the api must not need a second decision."""
    own, theirs = StoreFile("", "old", 1, 50), StoreFile("engine-1", "new", 2, 3)
    assert decisive_mark(own, theirs, StoreIdentity("new", 2, 4)) is theirs
    assert decisive_mark(own, theirs, StoreIdentity("old", 1, 40)) is own  # not accepted: ours decides, and refuses
    ahead = StoreFile("engine-1", "old", 1, 60)
    assert decisive_mark(own, ahead, StoreIdentity("old", 1, 70)) is own
    assert decisive_mark(None, theirs, None) is theirs
    assert decisive_mark(own, None, None) is own
    assert decisive_mark(None, None, None) is None


def test_a_redis_that_may_lose_writes_is_refused(settings, server, opened):
    with raw(settings) as client:
        client.config_set("appendfsync", "everysec")
        try:
            with pytest.raises(StoreMisconfigured, match="appendfsync is everysec"):
                opened(settings, "engine")
            weak = settings.model_copy(update={"allow_weak_durability": True})
            assert opened(weak, "engine").store.identity() is not None
        finally:
            client.config_set("appendfsync", "always")


def test_an_absent_redis_is_waited_for_until_we_are_to_end(tmp_path):
    settings = Settings(data_dir=tmp_path, redis_url="redis://127.0.0.1:9")
    stop = threading.Event()
    threading.Timer(0.3, stop.set).start()
    with pytest.raises(Stopped):
        open_store(settings, role="engine", stop=stop)


def test_the_api_answers_at_once_while_redis_is_away_and_opens_when_it_is_back(tmp_path, settings):
    away = StoreOpener(Settings(data_dir=tmp_path, redis_url="redis://127.0.0.1:9"), "api")
    began = time.monotonic()
    for _ in range(50):
        with pytest.raises(StoreUnavailable):
            away()
    assert time.monotonic() - began < 5.0
    here = StoreOpener(settings, "api")
    assert here() is here()
    here.close()


def test_the_apis_mark_follows_redis(settings):
    source = StoreOpener(settings, "api")
    source()
    set_commit(settings, 77)
    source.close()
    file = load_store_file(settings.data_dir / "api-store.json")
    assert file is not None
    assert file.commit == 77


def test_the_mark_is_written_at_most_once_an_interval_and_never_backwards(tmp_path):
    path = tmp_path / "store.json"
    writer = MarkWriter(path, StoreFile("e", "s", 1, 5), interval=0.2)
    for commit in range(6, 300):
        writer.update(commit)
    writer.update(10)
    assert load_store_file(path) is None
    deadline = time.monotonic() + 5
    while load_store_file(path) is None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert load_store_file(path) == StoreFile("e", "s", 1, 299)
    writer.update(301)
    writer.flush()
    assert load_store_file(path) == StoreFile("e", "s", 1, 301)


def test_a_full_disk_costs_the_mark_its_freshness_only(tmp_path):
    writer = MarkWriter(tmp_path / "gone" / "store.json", StoreFile("e", "s", 1, 5), interval=0.01)
    writer.update(6)
    time.sleep(0.1)
    (tmp_path / "gone").mkdir()
    writer.flush()
    assert load_store_file(tmp_path / "gone" / "store.json") == StoreFile("e", "s", 1, 6)


def start_on_a_bad_disk(settings):
    """A process whose first write of a mark fails; answers with what it said."""
    code = (
        "import sys; from service.settings import Settings; from service.store_access import open_store\n"
        "opened = open_store(Settings(data_dir=sys.argv[1], redis_url=sys.argv[2]), role='engine')\n"
        "print(opened.engine_id); opened.mark.flush(); opened.store.close()"
    )
    points = {"MIDSENTENCE_FAILPOINTS": "store_file.before_rename=eio", "MIDSENTENCE_TESTING": "1"}
    command = [sys.executable, "-c", code, str(settings.data_dir), settings.redis_url]
    done = subprocess.run(command, env=os.environ | points, capture_output=True, text=True, check=False)
    return done.stdout + done.stderr


def test_a_disk_that_refuses_at_a_start_does_not_stop_who_was_here_before(settings, opened):
    """Found by the chaos scenario disk_errors: the engine died at each start, and its jobs were blamed for it."""
    first = opened(settings, "engine")
    said = start_on_a_bad_disk(settings)
    assert first.engine_id in said.splitlines()
    assert "store_mark_not_written" in said


def test_a_disk_that_refuses_the_first_mark_is_named(settings):
    said = start_on_a_bad_disk(settings)
    assert "StorageError" in said
    assert "store.json cannot be written: [Errno 5]" in said
