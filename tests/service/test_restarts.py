"""Orderly ends and replacements of a real service under load: nothing is lost, little is computed again, nobody is refused.

The answers to compare with come from the same service before anything ended: greedy jobs of the same body give the same text.
"""

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace

import httpx
import pytest
from httpx_sse import connect_sse

from chaos.cluster import Cluster
from chaos.place import ClusterOptions
from chaos.processes import command_of, wait_until

JOBS = 20
PAGE_SIZE = 16
DRAIN = 20.0  #: seconds that an orderly end may take: what orchestrators are told
TOKENS = 380


def bodies():
    rng = random.Random(7)
    for number in range(JOBS):
        prompt = [rng.randrange(3, 500) for _ in range(rng.randrange(5, 100))]
        yield {"prompt": prompt, "max_tokens": TOKENS, "ignore_eos": True, "temperature": number % 2, "seed": number}


@contextlib.contextmanager
def client_of(cluster):
    with httpx.Client(base_url=cluster.url, timeout=120, trust_env=False) as client:
        yield client


def submit_all(client):
    return [client.post("/v1/jobs", json=body).json()["id"] for body in bodies()]


def job(client, job_id):
    return client.get(f"/v1/jobs/{job_id}").json()


def ended(client, job_ids, timeout=120.0):
    wait_until(lambda: all(job(client, one)["finished_at"] for one in job_ids), timeout, "the end of all jobs", pause=0.3)
    jobs = [job(client, one) for one in job_ids]
    assert {(one["status"], one["usage"]["completion_tokens"]) for one in jobs} == {("completed", TOKENS)}
    return jobs


def texts(jobs):
    return [(one["output"]["token_ids"], one["output"]["text"]) for one in jobs]


def all_running(client, job_ids, tokens=20):
    """Every job runs and is well into its answer."""

    def running():
        jobs = [job(client, one) for one in job_ids]
        return all(one["status"] == "in_progress" and one["usage"]["completion_tokens"] >= tokens for one in jobs)

    wait_until(running, 60.0, "all jobs running", pause=0.02)


@pytest.fixture(scope="module")
def options(tiny_folder):
    return ClusterOptions(str(tiny_folder), PAGE_SIZE, device_pages=1000, host_pages=2000)


@pytest.fixture(scope="module")
def reference(options, tmp_path_factory):
    with Cluster(tmp_path_factory.mktemp("reference"), options) as cluster:
        cluster.serve()
        with client_of(cluster) as client:
            answers = texts(ended(client, submit_all(client)))
        assert cluster.stop() == 0
    assert len({text for _, text in answers}) == JOBS
    return answers


def term(cluster, role):
    """SIGTERM; (exit code, seconds)."""
    began = time.monotonic()
    cluster.signal(role, signal.SIGTERM)
    return cluster.wait_exit(role, DRAIN + 10), time.monotonic() - began


def check_nothing_was_lost(cluster, job_ids, reference):
    with client_of(cluster) as client:
        jobs = ended(client, job_ids)
    assert texts(jobs) == reference
    replayed = [one["recovery"]["tokens_replayed"] for one in jobs]
    assert max(replayed) < PAGE_SIZE, replayed
    assert [one["recovery"]["count"] for one in jobs] == [0] * JOBS  # no owner died
    return replayed


def test_sigterm_to_serve_under_load(options, reference, tmp_path, record_property):
    with Cluster(tmp_path / "c", options) as cluster:
        cluster.serve()
        with client_of(cluster) as client:
            job_ids = submit_all(client)
            all_running(client, job_ids)
        code, seconds = term(cluster, "supervisor")
        assert (code, seconds < DRAIN) == (0, True), seconds
        assert not cluster.family.living()
        cluster.serve()
        replayed = check_nothing_was_lost(cluster, job_ids, reference)
        assert any(replayed)  # the jobs were in the middle of a page, and really went on from there
        assert cluster.stop() == 0
    record_property("drain_seconds", round(seconds, 2))
    record_property("tokens_replayed", replayed)


def test_sigterm_to_the_engine_alone_and_to_the_api_alone(options, reference, tmp_path):
    with Cluster(tmp_path / "c", options) as cluster:
        cluster.start_redis()
        cluster.start_api()
        cluster.start_engine()
        cluster.wait_ready()
        with client_of(cluster) as client:
            job_ids = submit_all(client)
            all_running(client, job_ids)
            code, seconds = term(cluster, "engine")
            assert (code, seconds < DRAIN) == (0, True), seconds
            assert {job(client, one)["status"] for one in job_ids} == {"queued"}
            cluster.start_engine()
            all_running(client, job_ids)
        code, seconds = term(cluster, "api")
        assert (code, seconds < DRAIN) == (0, True), seconds
        cluster.start_api()
        cluster.wait_ready()
        check_nothing_was_lost(cluster, job_ids, reference)


# the api is replaced -------------------------------------------------------------------------------------------------------


class Poster(threading.Thread):
    """A client that submits, waits for nothing, and remembers everything that went wrong."""

    def __init__(self, cluster, *, keep_alive):
        super().__init__(daemon=True)
        self.cluster, self.keep_alive = cluster, keep_alive
        self.errors, self.accepted, self.halt = [], [], threading.Event()

    def run(self):
        limits = httpx.Limits(max_keepalive_connections=1 if self.keep_alive else 0)
        with httpx.Client(base_url=self.cluster.url, timeout=30, trust_env=False, limits=limits) as client:
            while not self.halt.is_set():
                try:
                    answer = client.post("/v1/jobs", json={"prompt": [5, 6, 7], "max_tokens": 3})
                    if answer.status_code == 202:
                        self.accepted.append(answer.json()["id"])
                    else:
                        self.errors.append((answer.status_code, answer.text))
                except httpx.TransportError as error:
                    self.errors.append(repr(error))
                self.halt.wait(0.01)


class Follower(threading.Thread):
    """Reads one job's stream to its terminal event and, when a stream ends without one, goes on with ``Last-Event-ID``."""

    def __init__(self, cluster, job_id):
        super().__init__(daemon=True)
        self.cluster, self.job_id = cluster, job_id
        self.ids, self.text, self.streams, self.error = [], "", 0, None

    def run(self):
        with client_of(self.cluster) as client:
            while self.error is None and not self._read(client, {"Last-Event-ID": str(self.ids[-1])} if self.ids else {}):
                pass

    def _read(self, client, headers):
        self.streams += 1
        try:
            with connect_sse(client, "GET", f"/v1/jobs/{self.job_id}/events", headers=headers) as source:
                for event in source.iter_sse():
                    if event.event == "token":
                        self.ids.append(int(event.id))
                        self.text += json.loads(event.data)["text"]
                    elif event.event == "done":
                        return True
        except Exception as error:
            self.error = error
        return False


def test_the_api_is_replaced_five_times_and_no_client_notices(options, reference, tmp_path):
    patient = replace(options, settings={"lease_seconds": "60"})
    with Cluster(tmp_path / "c", patient) as cluster, client_of(cluster) as client:
        cluster.serve()
        job_ids = submit_all(client)
        readers = [Follower(cluster, one) for one in job_ids]
        posters = [Poster(cluster, keep_alive=True), Poster(cluster, keep_alive=False)]
        for thread in (*readers, *posters):
            thread.start()
        all_running(client, job_ids, tokens=5)
        engine = cluster.require_pid("engine")
        completion = threading.Thread(target=lambda: answers.append(_completion(cluster)), daemon=True)
        answers: list[httpx.Response] = []
        completion.start()
        seen = {cluster.require_pid("api")}
        cluster.signal("engine", signal.SIGSTOP)  # until the first replacement: the answers are in the middle then, surely
        for round_number in range(5):
            before = cluster.require_pid("api")
            count = len(posters[0].accepted)
            cluster.signal("supervisor", signal.SIGUSR2)
            cluster.wait_changed("api", before)
            wait_until(lambda n=round_number: _log(cluster).count("api replaced") == n + 1, 60.0, "the replacement", pause=0.05)
            wait_until(lambda n=count: len(posters[0].accepted) > n + 20, 20.0, "new jobs accepted")
            seen.add(cluster.require_pid("api"))
            cluster.signal("engine", signal.SIGCONT)
        assert len(seen) == 6
        for poster in posters:
            poster.halt.set()
        for thread in (*posters, *readers, completion):
            thread.join(120)
        assert [poster.errors for poster in posters] == [[], []]
        assert [reader.error for reader in readers] == [None] * JOBS
        assert all(reader.ids == list(range(1, TOKENS + 1)) for reader in readers)
        assert [reader.text for reader in readers] == [text for _, text in reference]
        assert max(reader.streams for reader in readers) > 1  # streams did end in the middle
        (answer,) = answers
        assert answer.status_code == 200  # it cannot be resumed, so the api that was replaced stayed for it
        assert answer.json()["usage"]["completion_tokens"] == TOKENS
        wait_until(lambda: len(_apis(cluster)) == 1, 20.0, "the end of the apis that were replaced")
        assert all(job(client, one)["id"] == one for poster in posters for one in poster.accepted)
        assert cluster.require_pid("engine") == engine
        assert cluster.stop() == 0


def _completion(cluster):
    body = {"prompt": "The log is the truth", "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    with client_of(cluster) as client:
        model = client.get("/v1/models").json()["data"][0]["id"]
        return client.post("/v1/completions", json={**body, "model": model})


def _log(cluster):
    return (cluster.logs / "serve.log").read_text()


def _apis(cluster):
    return [pid for pid in cluster.family.living() if " service.cli api " in command_of(pid)]


def test_a_new_api_that_cannot_start_leaves_the_old_one_serving(options, tmp_path):
    with Cluster(tmp_path / "c", options) as cluster, client_of(cluster) as client:
        cluster.serve()
        old = cluster.require_pid("api")
        mark = cluster.main.data_dir / "run" / "api.pid"
        cluster.signal("supervisor", signal.SIGUSR2)
        cluster.wait_changed("api", old)
        os.kill(cluster.require_pid("api"), signal.SIGKILL)  # still importing: long before it is ready
        wait_until(lambda: "the old one goes on" in _log(cluster), 20.0, "the failure is said")
        assert int(mark.read_text()) == old
        assert client.get("/readyz").status_code == 200
        assert cluster.stop() == 0


def test_a_socket_of_systemd_is_taken_and_outlives_the_api(options, tmp_path):
    """As systemd hands it down: descriptor 3, named by LISTEN_FDS and LISTEN_PID. It keeps listening between two lives."""
    with socket.socket() as listening, Cluster(tmp_path / "c", options) as cluster:
        listening.bind(("127.0.0.1", cluster.port))
        listening.listen()
        cluster.start_redis()
        with _activated_api(cluster, listening.fileno(), cluster.port + 1) as other:
            assert other.wait(60) == 78  # who may reach it was judged by the settings: they must be of this socket
        with _activated_api(cluster, listening.fileno(), cluster.port) as api, client_of(cluster) as client:
            assert client.get("/livez").status_code == 200
            api.terminate()
            assert api.wait(20) == 0
        asked: list[httpx.Response] = []
        waiting = threading.Thread(target=lambda: asked.append(httpx.get(f"{cluster.url}/livez", timeout=60)), daemon=True)
        waiting.start()  # nobody accepts now, and nobody is refused
        with _activated_api(cluster, listening.fileno(), cluster.port):
            waiting.join(60)
        assert asked[0].status_code == 200


@contextlib.contextmanager
def _activated_api(cluster, fd, port):
    activate = (
        f"import os, sys; os.dup2({fd}, 3); os.environ.update(LISTEN_FDS='1', LISTEN_PID=str(os.getpid()))\n"
        "os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
    )
    place = ["--data-dir", str(cluster.main.data_dir), "--model", cluster.options.model, "--redis-url", cluster.redis_url]
    command = [sys.executable, "-c", activate, "-m", "service.cli", "api", "--port", str(port), *place]
    process = subprocess.Popen(command, pass_fds=(fd,), env=cluster.family.environment(cluster.options.environment()))
    try:
        yield process
    finally:
        process.terminate()
        process.wait(20)
