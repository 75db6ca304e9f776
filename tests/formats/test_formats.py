"""Data directories of other versions (``make.py``): what was written is read as it was meant, or refused in words."""

import json
import shutil
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path

import pytest
import redis

from recovery.observe import observe
from recovery.plan import Action, plan
from recovery.sequences import SpecUnknown, hold
from service.recover_command import Options
from service.recover_command import main as recover
from service.redis_server import EmbeddedRedis
from service.settings import Settings
from service.store_access import open_store
from service.verify_command import main as verify
from service.worker.state import take_in
from storage import keys, pool_header
from storage.errors import StorageError, WrongStore
from storage.job_spec import JobSpec
from storage.pool_file import PoolFile
from storage.pool_header import NotAPool
from storage.pool_reader import PoolReader
from storage.records import JobAnswer, OwnedJob
from storage.session import FORMAT
from storage.store_file import StoreFile
from tests.formats.make import GEOMETRY
from tests.storage.backends import EngineUnderTest, commit_of, submit

WRITTEN = sorted(Path(__file__).parent.glob("v*"))


class Directory:
    """A copy of a fixture, with the modes that git does not keep."""

    def __init__(self, written, copy):
        shutil.copytree(written, copy, ignore=shutil.ignore_patterns("expected.json"))
        for path in (copy, *copy.rglob("*")):
            path.chmod(0o700 if path.is_dir() else 0o600)
        self.path = copy
        self.expected = json.loads((written / "expected.json").read_text())
        self.pool = copy / "pool.safetensors"

    @contextmanager
    def redis(self):
        server = EmbeddedRedis(self.path)
        try:
            with redis.Redis.from_url(server.start_or_attach(timeout=10), decode_responses=True) as client:
                yield server.url, client
        finally:
            server.stop()

    @contextmanager
    def opened(self, role="engine"):
        with self.redis() as (url, client):
            opened = open_store(Settings(data_dir=self.path, redis_url=url), role=role)
            try:
                yield opened.store, client
            finally:
                opened.mark.flush()
                opened.store.close()

    def change(self, *command):
        with self.redis() as (_, client):
            client.execute_command(*command)

    def rewrite_header(self, change):
        """The header of the pool file with other metadata, in the same place."""
        content = self.pool.read_bytes()
        length = int.from_bytes(content[:8], "little")
        values = json.loads(content[8 : 8 + length])
        change(values["__metadata__"])
        self.pool.write_bytes(content[:8] + json.dumps(values).encode().ljust(length) + content[8 + length :])

    def planned(self, store):
        pool = PoolReader(self.pool)
        try:
            (engine,) = store.engines()
            return {job.job_id: job for job in plan(observe(store, engine, pool, is_alive=lambda _: False)).jobs}
        finally:
            pool.close()


@pytest.fixture(params=WRITTEN, ids=lambda path: path.name)
def directory(request, tmp_path):
    return Directory(request.param, tmp_path / "data")


def goes_on(directory):
    """Everything in it is what was written, and every job can be finished. All that a start would look at is looked at."""
    with directory.opened() as (store, _):
        for job_id, tokens in directory.expected["tokens"].items():
            record = store.get(job_id)
            (taken,) = take_in(store, (OwnedJob(job_id, record.fence, 0),))
            held, request = hold(taken.owned, taken.record, taken.entries, "arithmetic")
            assert list(request.generated_ids) == tokens
            assert list(request.prompt_ids) == directory.expected["prompt"]
            assert json.loads(held.spec.to_json()) == directory.expected["spec"]
        planned = directory.planned(store)
        running = planned["job-running"]
        assert (running.action, running.pages_restored) == (Action.RESUME, 3)
        assert planned["job-queued"].action is Action.START
        engine = EngineUnderTest(store, incarnation="next", pool_id=PoolReader(directory.pool).header.pool_id)
        assert [job.job_id for job in engine.register().owned] == ["job-running"]
        assert engine.write(commit_of(store.get("job-running"), 99)).commits == (JobAnswer.OK,)


def test_what_was_written_is_read_as_it_was_meant(directory, capsys):
    assert verify(Settings(data_dir=directory.path), as_json=True) == 0, capsys.readouterr().out
    goes_on(directory)


def test_a_store_without_a_format_is_the_first(directory):
    directory.change("HDEL", keys.STORE, "format")
    goes_on(directory)


def test_what_is_written_today_is_in_the_newest_fixture(tmp_path):
    """Whoever adds a field, or gives one another name, makes a fixture of it, and keeps those that are there."""
    newest = Directory(WRITTEN[-1], tmp_path / "data")
    with newest.opened() as (store, client):
        submit(store, "job-of-today", spec=JobSpec("demo", 1, 1).to_json())
        engine = EngineUnderTest(store, "engine-of-today")
        engine.register()
        engine.claim()
        engine.commit("job-of-today", 1)
        pairs = {"job-of-today": "job-running", "engine-of-today": "engine-1"}
        for today, then in pairs.items():
            key = keys.job if today.startswith("job") else keys.engine
            assert set(client.hkeys(key(today))) == set(client.hkeys(key(then)))
        (_, entry), *_ = client.xrange(keys.log("job-of-today"))
        assert entry.keys() == client.xrange(keys.log("job-running"))[0][1].keys()
        assert client.hget(keys.STORE, "format") == FORMAT
    assert newest.expected["spec"].keys() == json.loads(JobSpec("demo", 1, 1).to_json()).keys()
    assert json.loads((newest.path / "store.json").read_text()).keys() == {field.name for field in fields(StoreFile)}
    _, head = pool_header.build(pool_id="p", **GEOMETRY)
    length = int.from_bytes(newest.pool.read_bytes()[:8], "little")
    told = (json.loads(text)["__metadata__"] for text in (head[8:], newest.pool.read_bytes()[8 : 8 + length]))
    assert next(told).keys() == next(told).keys()


# --- newer than this version -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("role", ["engine", "api"])
def test_a_store_of_a_newer_format_is_refused_and_stays_as_it_is(directory, role):
    directory.change("HSET", keys.STORE, "format", "2")
    with directory.redis() as (url, client):
        before = {key: client.dump(key) for key in client.scan_iter("*")}
        settings = Settings(data_dir=directory.path, redis_url=url)
        attempts = (
            lambda: open_store(settings, role=role),
            lambda: verify(settings, as_json=True),
            lambda: recover(settings, Options()),
            lambda: recover(settings, Options(accept_store=True)),
        )
        for attempt in attempts:
            with pytest.raises(WrongStore, match=r"has format 2, this version of midsentence knows format 1 \(use the version"):
                attempt()
        assert {key: client.dump(key) for key in client.scan_iter("*")} == before


def test_a_store_that_becomes_newer_under_a_running_process_is_refused(directory):
    with directory.opened() as (store, client):
        client.hset(keys.STORE, "format", "2")
        with pytest.raises(WrongStore, match="format 2"):
            store.get("job-running")
        client.hset(keys.STORE, "epoch", "2")  # as the rule for formats wants it: then no script writes either
        with pytest.raises(WrongStore):
            store.cancel("job-running")
        client.hset(keys.STORE, mapping={"format": "1", "epoch": "1"})
        assert store.get("job-running").log_length == 30


def test_a_newer_pool_is_refused_and_not_replaced(directory):
    directory.rewrite_header(lambda metadata: metadata.update(version="2"))
    before = directory.pool.read_bytes()
    with pytest.raises(NotAPool, match="pool format '2' is not known to this version"):
        PoolFile.open(directory.pool, **GEOMETRY)
    assert directory.pool.read_bytes() == before


@pytest.mark.parametrize("change", [{"more": 1}, {"commit": None}], ids=["a field more", "a field less"])
def test_a_mark_of_another_shape_is_refused_by_its_fields(directory, change):
    path = directory.path / "store.json"
    values = {**json.loads(path.read_text()), **change}
    path.write_text(json.dumps({name: value for name, value in values.items() if value is not None}))
    with (
        directory.redis() as (url, _),
        pytest.raises(StorageError, match=r"store\.json cannot be used: it needs exactly"),
    ):
        open_store(Settings(data_dir=directory.path, redis_url=url), role="engine")


# --- fields that this version does not know ----------------------------------------------------------------------------


def test_fields_beside_those_we_know_change_nothing(directory):
    directory.rewrite_header(lambda metadata: metadata.update(more="of a newer version"))
    with directory.redis() as (_, client):
        client.hset(keys.STORE, "more", "1")
        client.hset(keys.engine("engine-1"), "more", "1")
        for job_id in directory.expected["tokens"]:
            client.hset(keys.job(job_id), "more", "1")
    goes_on(directory)


def test_a_job_that_asks_for_more_than_we_know_is_refused_alone(directory):
    """An api of a newer version took it in: without the field it would get other tokens than were promised."""
    with directory.opened() as (store, client):
        newer = json.dumps({**directory.expected["spec"], "speculate": True})
        client.hset(keys.job("job-queued"), "spec", newer)
        (taken,) = take_in(store, (OwnedJob("job-queued", 1, 0),))
        with pytest.raises(SpecUnknown, match="job-queued asks for speculate"):
            hold(taken.owned, taken.record, taken.entries, "arithmetic")
        assert JobSpec.from_json(newer) == JobSpec.from_json(client.hget(keys.job("job-running"), "spec"))
        planned = directory.planned(store)
        assert (planned["job-queued"].action, planned["job-queued"].code) == (Action.FAIL, "spec_unknown")
        assert planned["job-running"].action is Action.RESUME
