"""A second engine waits, and takes over when the first one dies: the real service, and what waiting is by itself."""

import json
import os
import signal
import sys
import threading
from contextlib import closing
from pathlib import Path

import httpx
import pytest

from chaos.cluster import Cluster
from chaos.memory import MemoryGroup, no_memory_group
from chaos.place import ClusterOptions
from chaos.processes import wait_until
from engine import packed_weights, pool_memory
from service.children import LastExit
from service.settings import Settings
from service.worker import build
from service.worker.standby import wait_for_turn

TOKENS = 300


def events(cluster, name):
    lines = (cluster.logs / "serve.log").read_text().splitlines()
    return [event for event in map(json.loads, filter(lambda line: line.startswith("{"), lines)) if event["event"] == name]


def standby_of(cluster, other_than=None):
    """The pid of one that has all it needs: how many have said so tells whether this one did."""
    wait_until(lambda: cluster.pid("standby") not in (None, other_than), 60.0, "an engine in waiting")
    started = len(events(cluster, "standby_takes_over")) + 1
    wait_until(lambda: len(events(cluster, "standby_ready")) >= started, 60.0, "a prepared engine")
    return cluster.pid("standby")


def pool_memory_of(pid):
    """Which file without a name; nobody else has the same number."""
    with open(pool_memory.of_process(pid), "rb") as memory:
        return os.fstat(memory.fileno()).st_ino


def submit(client, number):
    body = {"prompt": [number, 5, 7], "max_tokens": TOKENS, "ignore_eos": True, "temperature": 0.8, "seed": number}
    return client.post("/v1/jobs", json=body).json()["id"]


def tokens_of(client, job_ids):
    wait_until(lambda: all(job(client, one)["finished_at"] for one in job_ids), 60.0, "the end of all jobs", pause=0.05)
    return [job(client, one)["output"]["token_ids"] for one in job_ids]


def job(client, job_id):
    return client.get(f"/v1/jobs/{job_id}").json()


def test_it_takes_over_twice_and_every_token_is_the_same(tiny_folder, tmp_path):
    options = ClusterOptions(str(tiny_folder), settings={"log_format": "json"})
    with Cluster(tmp_path / "c", options) as cluster, httpx.Client(timeout=90.0, trust_env=False) as client:
        cluster.serve()
        client.base_url = cluster.url
        standby = standby_of(cluster)
        memory = pool_memory_of(cluster.pid("engine"))
        expected = tokens_of(client, [submit(client, number) for number in range(4)])
        for _ in range(2):
            jobs = [submit(client, number) for number in range(4)]
            wait_until(
                lambda one=jobs[-1]: job(client, one)["usage"]["completion_tokens"] > 20, 60.0, "tokens of all jobs", pause=0.02
            )
            engine = cluster.signal("engine", signal.SIGKILL)
            assert cluster.wait_changed("engine", engine) == standby
            assert pool_memory_of(standby) == memory  # and with it what the dead one computed there: no page table names it
            assert tokens_of(client, jobs) == expected
            standby = standby_of(cluster, other_than=standby)
        assert cluster.verify()["findings"] == []
        told = [event["last_exit"] for event in events(cluster, "standby_takes_over")]
        registered = events(cluster, "registered")
    assert told == ["benign", "benign"]
    assert [len(tokens) for tokens in expected] == 4 * [TOKENS]
    assert all(event["jobs"] for event in registered[1:])
    first, *others = (event["phases"] for event in registered)
    assert all(phases["imports"] + phases["model"] < first["imports"] / 2 for phases in others)


#: Takes as much memory as there is, a little at a time. While the kernel still collects what its first victim had, it may
#: choose a second one: that is this one, then (its score lies between those of the two engines).
EATER = """
import time
open("/proc/self/oom_score_adj", "w").write("750")
eaten = []
while True: eaten.append(b"x" * (1 << 20)); time.sleep(0.005)
"""


@pytest.mark.skipif(bool(no_memory_group()), reason=no_memory_group() or "there is one")
def test_where_memory_runs_out_it_is_the_first_to_go_and_nobody_is_blamed(tiny_folder, tmp_path):
    options = ClusterOptions(str(tiny_folder), settings={"log_format": "json"})
    with closing(MemoryGroup()) as group, Cluster(tmp_path / "c", options) as cluster:
        cluster.preludes["serve"] = group.prelude
        cluster.serve()
        standby, engine, api = standby_of(cluster), cluster.pid("engine"), cluster.pid("api")
        group.limit(group.in_use + (16 << 20))
        eater = cluster.start_beside("eater", [sys.executable, "-c", EATER], group.prelude)
        wait_until(lambda: cluster.family.gone(standby), 30.0, "the kernel kills the one that waits")
        cluster.family.signal(eater, signal.SIGKILL)
        group.limit(None)
        assert (cluster.pid("engine"), cluster.pid("api")) == (engine, api)
        wait_until(lambda: "the engine in waiting died (SIGKILL)" in cluster.log_tail("serve"), 10.0, "its death is seen")
        # One of which it is known whose it was; of a second one the supervisor cannot know.
        expected = "benign" if group.oom_kills == 1 else "crash"
        cluster.signal("engine", signal.SIGKILL)  # from outside
        wait_until(lambda: len(events(cluster, "registered")) == 2, 60.0, "the next engine")
        assert [event["last_exit"] for event in events(cluster, "registered")] == ["benign", expected]


@pytest.fixture
def settings(tiny_folder, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return Settings(model=str(tiny_folder), data_dir=tmp_path / "data", threads=1)


def oom_score():
    return int(Path("/proc/self/oom_score_adj").read_text())


def test_weights_that_are_not_packed_are_not_read_twice(settings):
    reader, writer = os.pipe()
    os.write(writer, b"crash\n")
    os.close(writer)
    turn = wait_for_turn(settings, reader)
    assert (turn.last_exit, turn.loaded) == (LastExit.CRASH, None)


def test_a_packed_model_is_mapped_and_proved_before_the_turn(settings):
    build.load(settings)  # packs it
    fingerprint = build.model_source.fingerprint(build.model_source.resolve(settings.model))
    assert packed_weights.folder_for(fingerprint, settings.weights).is_dir()
    before, while_waiting = oom_score(), []
    reader, writer = os.pipe()

    def say():
        wait_until(lambda: oom_score() != before, 60.0, "a higher score")
        while_waiting.append(oom_score())
        os.write(writer, b"benign\n")

    threading.Thread(target=say).start()
    turn = wait_for_turn(settings, reader)
    os.close(writer)
    assert turn.last_exit is LastExit.BENIGN
    assert turn.loaded.problems == ()
    assert while_waiting == [min(1000, before + 300)]
    assert oom_score() == before


def test_without_a_word_there_is_no_turn(settings):
    reader, writer = os.pipe()
    os.close(writer)
    assert wait_for_turn(settings, reader) is None
