"""``midsentence verify`` on a real Redis, pool file and directory: finds what is planted, else nothing; changes nothing.

Each kind of damage in Redis alone is planted in ``tests/storage/test_audit.py``.
"""

import hashlib
import json
import os
import subprocess
import sys
import threading
from contextlib import contextmanager
from dataclasses import replace

import httpx
import numpy as np
import pytest
import redis

from chaos.cluster import Cluster
from chaos.place import ClusterOptions
from service.errors import ServiceError
from service.processes import lock_is_held, prepare_directory
from service.redis_server import EmbeddedRedis
from service.settings import Settings
from service.verify_command import main
from storage import keys
from storage.pool_file import PoolFile
from storage.records import PageEntry
from storage.redis_store import RedisJobStore
from storage.store_file import StoreFile, load_store_file, save_store_file
from tests.storage.backends import MODEL, EngineUnderTest, submit

MARKS = ("store.json", "api-store.json")
PAGES, SHAPE = 8, (2, 2, 16, 2, 8)


def identity(number):
    return f"{number:032x}"


class Installation:
    """A data directory as an engine and an api leave it: two jobs, five published pages, marks. Nothing of it runs."""

    def __init__(self, directory):
        self.directory = prepare_directory(directory)
        self.settings = Settings(data_dir=directory)
        self.pool = directory / "pool.safetensors"
        self.engine_id = "engine-1"
        with self.running() as url, self.open_pool() as pool:
            store = RedisJobStore(url)
            store.bind(store.create("store-1"))
            submit(store, "job-1")
            submit(store, "job-2", idempotency_key="k")
            engine = EngineUnderTest(store, pool_id=pool.pool_id)
            engine.register()
            engine.claim(limit=1)
            entries = {page: self.fill(pool, page, page) for page in range(5)}
            engine.write(publish=entries)
            engine.commit("job-1", 1, 2, 3)
            self.identity = store.identity()
            store.close()
            self.pool_id = pool.pool_id
        for name, engine_id in (("store.json", "engine-1"), ("api-store.json", "")):
            save_store_file(directory / name, StoreFile(engine_id, "store-1", 1, self.identity.commit))

    @contextmanager
    def running(self):
        server = EmbeddedRedis(self.directory)
        try:
            yield server.start_or_attach(timeout=10)
        finally:
            server.stop()

    def open_pool(self, model=MODEL):
        return PoolFile.open(self.pool, num_pages=PAGES, page_shape=SHAPE, dtype="float32", model_fingerprint=model)

    @staticmethod
    def fill(pool, page, number):
        """A page that was never there before, and its entry."""
        data = np.random.default_rng(number).integers(0, 256, pool.page_bytes, dtype=np.uint8)
        return PageEntry(identity(number), pool.write_pages(page, data)[0])

    def raw(self, *command):
        with self.running() as url, redis.Redis.from_url(url) as client:
            client.execute_command(*command)

    def flip(self, page):
        with self.open_pool() as pool:
            offset = pool.header.data_offset + page * pool.page_bytes + 77
        with open(self.pool, "r+b") as file:
            file.seek(offset)
            byte = file.read(1)[0]
            file.seek(offset)
            file.write(bytes([byte ^ 4]))

    def change_mark(self, name, **values):
        mark = load_store_file(self.directory / name)
        save_store_file(self.directory / name, replace(mark, **values))

    def contents(self):
        """Of every file but what Redis must write at a start: its own log, and who holds its lock."""
        files = (path for path in self.directory.rglob("*") if path.is_file())
        told = {path: hashlib.sha256(path.read_bytes()).hexdigest() for path in files if path.parent.name != "run"}
        return {path: digest for path, digest in told.items() if path.name != "redis.log"}


@pytest.fixture
def place(tmp_path):
    return Installation(tmp_path / "data")


@pytest.fixture
def verify(capsys):
    def run(settings):
        code = main(settings, as_json=True)
        return code, json.loads(capsys.readouterr().out)

    return run


def test_a_good_one_is_clean_and_stays_as_it_was(place, verify):
    before = place.contents()
    code, report = verify(place.settings)
    assert (code, report["verdict"], report["findings"]) == (0, "clean", [])
    assert report["checked"] | {"keys": 0, "files": 0} == {
        "jobs": 2, "tokens": 3, "keys": 0, "pages": 5, "engines": 1, "files": 0,
    }  # fmt: skip
    assert report["service_running"] is False
    assert place.contents() == before
    assert not lock_is_held(place.directory / "run" / "redis.lock")  # the server that it started is gone


def cut_pool(place):
    os.truncate(place.pool, place.pool.stat().st_size - 1)


def foreign_pool(place):
    place.pool.write_bytes(b"\x02\x00\x00\x00\x00\x00\x00\x00{}")


def other_pool(place):
    place.pool.unlink()
    place.open_pool().close()


def other_model(place):
    place.raw("HSET", keys.engine("engine-1"), "model", "model-b")


def table(page, text):
    return lambda place: place.raw("HSET", keys.pool(place.pool_id), page, text)


def leave(name):
    return lambda place: (place.directory / name).write_text("x")


#: name -> (what is done, exit code, severity, check, where, a word of what must be said)
PLANTED = {
    "chain": (lambda p: p.raw("HSET", keys.job("job-1"), "spec", "{}"), 2, "damage", "log", "job-1", "chain hash"),
    "hole": (lambda p: p.raw("XDEL", keys.log("job-1"), "2-0"), 2, "damage", "log", "job-1", "entry 2"),
    "place": (lambda p: p.raw("DEL", keys.queue(MODEL)), 2, "damage", "job", "job-2", "not listed"),
    "stranger": (lambda p: p.raw("SET", keys.PREFIX + "x", "y"), 1, "repairable", "key", "x", "no key of this version"),
    "rolled back": (lambda p: p.change_mark("store.json", commit=999), 2, "damage", "store", "store.json", "lost commits"),
    "epoch": (lambda p: p.change_mark("api-store.json", epoch=2), 2, "damage", "store", "api-store.json", "epoch 1"),
    "other store": (
        lambda p: [p.change_mark(name, store_id="b") for name in MARKS],
        2, "damage", "store", "api-store.json", "belong to store b",
    ),
    "accepted": (lambda p: p.change_mark("api-store.json", store_id="b"), 0, "note", "store", "api-store.json", "is void"),
    "empty": (lambda p: p.raw("FLUSHALL"), 2, "damage", "store", "store.json", "Redis is empty"),
    "no store": (lambda p: p.raw("DEL", keys.STORE), 2, "damage", "store", "store", "no store that they belong to"),
    "mark": (lambda p: (p.directory / "store.json").write_text("{"), 2, "damage", "store", "store.json", "cannot be used"),
    "no marks": (
        lambda p: [(p.directory / name).unlink() for name in MARKS],
        0, "note", "store", "data directory", "no engine or api",
    ),
    "bit": (lambda p: p.flip(3), 1, "repairable", "page", "host page 3", "checksum"),
    "no pool": (lambda p: p.pool.unlink(), 1, "repairable", "pool", "pool.safetensors", "No such file"),
    "cut pool": (cut_pool, 1, "repairable", "pool", "pool.safetensors", "do not fit a file of"),
    "foreign pool": (foreign_pool, 1, "repairable", "pool", "pool.safetensors", "not a Midsentence pool"),
    "other pool": (other_pool, 1, "repairable", "pool", "pool.safetensors", "no page of it is used"),
    "other model": (other_model, 1, "repairable", "pool", "pool.safetensors", "holds pages of model model-a"),
    "range": (table(PAGES, f"{'f' * 32} 1"), 1, "repairable", "pool", f"host page {PAGES}", "the pool file has 8 pages"),
    "double": (table(5, f"{identity(2)} 1"), 1, "repairable", "pool", "host page 5", "identity of host page 2"),
    "entry": (table(5, "f"), 2, "damage", "pool", "host page 5", "cannot be read"),
    "old pool": (leave("old.safetensors"), 1, "repairable", "file", "old.safetensors", "left behind"),
    "half mark": (leave(".store.json.tmp"), 1, "repairable", "file", ".store.json.tmp", "left behind"),
    "half pool": (leave(".pool.safetensors.ab.tmp"), 1, "repairable", "file", ".pool.safetensors.ab.tmp", "left behind"),
    "other file": (leave("notes.txt"), 0, "note", "file", "notes.txt", "not a file of ours"),
    "open file": (lambda p: p.pool.chmod(0o640), 1, "repairable", "file", "pool.safetensors", "mode 640"),
    "open folder": (lambda p: p.directory.chmod(0o755), 1, "repairable", "file", "data directory", "mode 755"),
    "open log": (lambda p: next((p.directory / "redis").glob("*/*.aof")).chmod(0o644), 1, "repairable", "file", None, "mode 644"),
}  # fmt: skip


@pytest.mark.parametrize("name", PLANTED)
def test_what_is_planted_is_found(place, verify, name):
    plant, code, severity, check, where, says = PLANTED[name]
    plant(place)
    got, report = verify(place.settings)
    found = report["findings"]
    assert [
        f
        for f in found
        if (f["severity"], f["check"]) == (severity, check) and f["where"] == (where or f["where"]) and says in f["what"]
    ], found
    assert got == code, found
    assert report["verdict"] == {0: "clean", 1: "repairable", 2: "damage"}[code]
    assert severity == "note" or all(finding["fix"] for finding in found if finding["severity"] == severity)


def test_the_pool_of_another_directory_is_named_and_checked_there(place, verify, tmp_path):
    with place.running() as url:
        other = Settings(data_dir=prepare_directory(tmp_path / "other"), redis_url=url)
        code, report = verify(other)
        assert code == 0
        assert [f["where"] for f in report["findings"]] == ["data directory", "engine-1"]
        place.flip(1)
        assert verify(other)[0] == 0
        assert verify(place.settings)[0] == 1


def test_what_cannot_be_checked_is_refused(place, tmp_path):
    with pytest.raises(ServiceError, match="no data directory"):
        main(Settings(data_dir=tmp_path / "none"), as_json=True)
    with pytest.raises(ServiceError, match="no embedded Redis ever ran"):
        main(Settings(data_dir=tmp_path), as_json=True)
    assert not list(tmp_path.glob("r*"))
    next((place.directory / "redis" / "appendonlydir").glob("*.incr.aof")).write_bytes(b"*3\r\n$3\r\nSET\r\n$1\r\n" + bytes(64))
    with pytest.raises(ServiceError, match="ended while starting"):
        main(place.settings, as_json=True)


def test_beside_an_engine_that_reuses_its_pages(place, verify):
    """Entries go, pages are written again, marks are renewed: none of it is damage, and a flipped bit is found beside it."""
    done, began = threading.Event(), threading.Event()
    with place.running() as url, place.open_pool() as pool:
        store = RedisJobStore(url, single_connection=True)
        store.bind(store.identity())
        engine = EngineUnderTest(store, pool_id=pool.pool_id)

        def work():
            number = 0
            while not done.is_set():
                page = 5 + number % 3
                engine.write(drop=(page,))
                engine.write(publish={page: place.fill(pool, page, 100 + number)})
                engine.commit("job-1", number)
                place.change_mark("store.json", commit=store.identity().commit)
                number += 1
                began.set()

        worker = threading.Thread(target=work)
        worker.start()
        began.wait(10)
        try:
            for _ in range(10):
                code, report = verify(place.settings)
                assert (code, report["findings"]) == (0, [])
            with open(place.pool, "r+b") as file:
                file.seek(pool.header.data_offset + 2 * pool.page_bytes)
                file.write(b"damaged")
            code, report = verify(place.settings)
            assert code == 1
            assert [finding["where"] for finding in report["findings"]] == ["host page 2"]
        finally:
            done.set()
            worker.join()
            store.close()


def test_the_table_names_what_where_and_the_fix(place, capsys):
    place.flip(3)
    assert main(place.settings, as_json=False) == 1
    said = capsys.readouterr().out
    for words in ("repairable", "host page 3", "checksum", "recomputed from the log", "jobs 2, tokens 3"):
        assert words in said


def test_it_loads_no_model_code():
    code = (
        "import sys, service.verify_command; print([m for m in ('torch', 'numba', 'transformers', 'fastapi') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_a_service_that_was_killed_is_clean_while_it_runs_and_after(tiny_folder, tmp_path):
    with Cluster(tmp_path / "c", ClusterOptions(str(tiny_folder))) as cluster:
        cluster.serve()
        bodies = [{"prompt": list(range(20 + i, 90)), "max_tokens": 400, "seed": i, "ignore_eos": True} for i in range(6)]
        ids = [httpx.post(f"{cluster.url}/v1/jobs", json=body).json()["id"] for body in bodies]
        cluster.wait_changed("engine", cluster.signal("engine", 9))
        assert len(ids) == 6
        report = cluster.verify()
        assert report["findings"] == []
        assert report["service_running"] is True
        cluster.kill_all()
        report = cluster.verify()
        assert report["findings"] == []
        assert report["service_running"] is False
        assert report["checked"]["jobs"] == 6
        assert report["checked"]["pages"] > 0
        assert cluster.family.living() == []
