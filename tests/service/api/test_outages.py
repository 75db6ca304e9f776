"""Redis away, the wrong Redis, this process's own end, dead engines: what clients and probes see."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time

import httpx
import pytest
import structlog
from prometheus_client import CollectorRegistry

from service.api.background import Background
from service.api.context import ApiOptions, Context
from service.errors import PortInUse
from service.listening import bind
from storage.errors import StoreUnavailable, WrongStore
from storage.memory_store import MemoryJobStore
from storage.records import NewJob
from tests.servers import running_redis, valkey_binary
from tests.service.api.conftest import open_redis_store
from tests.service.api.rig import DIRECT, PROMPT, ScriptedEngine, Source, Stream, running_api, until


@pytest.fixture
def server(tmp_path):
    with running_redis(valkey_binary(), tmp_path / "valkey") as running:
        yield running


@pytest.fixture
def engine_store(server):
    store = open_redis_store(server, timeout=5.0)
    yield store
    store.close()


@pytest.fixture
def api_store(engine_store, server):
    from storage.redis_store import RedisJobStore

    store = RedisJobStore(server.url, timeout=1.0)
    store.bind(engine_store.identity())
    yield store
    store.close()


def ready(api):
    answer = api.client.get("/readyz")
    assert (answer.status_code == 200) == answer.json()["ready"]
    return answer.json()["ready"]


def reasons(api):
    return api.client.get("/readyz").json()["reasons"]


def retrying(call, seconds=30.0):
    deadline = time.monotonic() + seconds
    while True:
        try:
            return call()
        except StoreUnavailable:
            assert time.monotonic() < deadline
            time.sleep(0.05)


def test_kill_9_of_redis_is_a_pause_for_open_streams(server, engine_store, api_store, model):
    engine = ScriptedEngine(engine_store)
    with running_api(api_store, model, keep_alive=0.1) as api:
        jobs = [api.submit(max_tokens=64) for _ in range(4)]
        streams = [Stream(api, job_id) for job_id in jobs]
        for job_id in jobs:
            engine.claim_one(job_id)
        for _ in range(20):
            engine.write(*jobs)
        until(lambda: all(stream.tokens for stream in streams))
        server.kill()
        answer = api.client.get(f"/v1/jobs/{jobs[0]}")
        assert (answer.status_code, answer.json()["code"]) == (503, "store_unavailable")
        assert int(answer.headers["Retry-After"]) > 0
        assert api.client.post("/v1/jobs", json={"prompt": PROMPT}).status_code == 503
        assert api.client.get("/livez").status_code == 200
        until(lambda: "redis" in reasons(api))
        time.sleep(0.3)
        assert not any(stream.ended.is_set() for stream in streams)
        server.start()
        for _ in range(43):
            retrying(lambda: engine.write(*jobs))
        engine.write(*jobs, end="length")
        for stream in streams:
            assert stream.wait().tokens == list(range(100, 164))
            assert [int(event.id) for event in stream.events if event.id] == list(range(1, 66))
        until(lambda: api.submit())


def test_a_redis_that_hangs_is_a_pause_too(server, engine_store, api_store, model):
    engine = ScriptedEngine(engine_store)
    with running_api(api_store, model) as api:
        job_id = api.submit(max_tokens=8)
        engine.claim_one(job_id)
        engine.write(job_id, tokens=3)
        stream = Stream(api, job_id)
        until(lambda: len(stream.tokens) == 3)
        server.stop()
        try:
            until(lambda: not ready(api))
            began = time.monotonic()
            assert api.client.get("/livez").status_code == 200
            assert time.monotonic() - began < 0.9  # who asked Redis would wait for a second
            assert not stream.ended.is_set()
        finally:
            server.go_on()
        retrying(lambda: engine.write(job_id, tokens=5, end="length"))
        assert stream.wait().tokens == list(range(100, 108))


def test_it_comes_up_without_a_store_and_finds_it_later(model):
    store = MemoryJobStore()
    store.bind(store.create("test"))
    with running_api(store, model, StoreUnavailable("connection refused")) as api:
        until(lambda: reasons(api).get("redis") == "connection refused")
        assert api.client.post("/v1/jobs", json={"prompt": PROMPT}).status_code == 503
        api.source.error = None
        assert api.submit()


def test_the_wrong_store_is_refused_with_the_reason(memory_api):
    memory_api.source.error = WrongStore("Redis holds store B, we belong to store A", "put the right Redis back")
    answer = memory_api.client.post("/v1/jobs", json={"prompt": PROMPT})
    assert (answer.status_code, answer.json()["code"]) == (503, "wrong_store")
    assert "store B" in answer.json()["detail"]
    assert "put the right Redis back" in answer.json()["detail"]
    until(lambda: "store B" in reasons(memory_api).get("store", ""))
    openai = memory_api.client.post("/v1/completions", json={"model": "tiny", "prompt": PROMPT})
    assert (openai.status_code, openai.json()["error"]["code"]) == (503, "wrong_store")


def test_ready_needs_a_living_engine_of_the_model(store, model):
    with running_api(store, model, lease_seconds=0.9) as api:
        until(lambda: "engine" in reasons(api))
        engine = ScriptedEngine(store)
        until(lambda: ready(api))
        deadline = time.monotonic() + 1.2
        while time.monotonic() < deadline:
            engine.beat()
            assert ready(api)
            time.sleep(0.1)
        job_id = api.submit()
        engine.claim_one(job_id)
        engine.write(job_id, tokens=2)
        # The engine is dead from here on: its job goes back to the queue, for another.
        until(lambda: api.job(job_id)["status"] == "queued")
        assert not ready(api)
        other = ScriptedEngine(store, "engine-2")
        other.claim_one(job_id)
        other.write(job_id, end="stop")
        assert api.job(job_id)["output"]["token_ids"] == [100, 101, 102]


def test_an_old_record_of_an_engine_is_no_living_engine(store, model):
    ScriptedEngine(store)
    with running_api(store, model) as api:
        time.sleep(0.3)
        assert "engine" in reasons(api)


# --- the end -------------------------------------------------------------------------------------------------------------


def test_drain_closes_streams_without_an_end_and_refuses_new_work(store, model):
    engine = ScriptedEngine(store)
    with running_api(store, model, drain_seconds=1.0) as api:
        job_id = api.submit()
        engine.claim_one(job_id)
        engine.write(job_id, tokens=3)
        stream = Stream(api, job_id)
        until(lambda: len(stream.tokens) == 3)
        waiting: list[httpx.Response] = []
        completion = {"model": "tiny", "prompt": PROMPT}
        ask = lambda: waiting.append(httpx.post(f"{api.url}/v1/completions", json=completion, **DIRECT))  # noqa: E731
        thread = threading.Thread(target=ask)
        thread.start()
        plain = until(lambda: engine.claim())[0]
        api.drain()
        stream.wait()
        assert (stream.tokens, stream.names[-1]) == ([100, 101, 102], "in_progress")
        assert reasons(api) == {"draining": "this server is about to end"}
        refused = api.client.post("/v1/jobs", json={"prompt": PROMPT})
        assert (refused.status_code, refused.json()["code"]) == (503, "draining")
        assert int(refused.headers["Retry-After"]) > 0
        assert api.client.get(f"/v1/jobs/{job_id}").status_code == 200
        thread.join(10)
        assert (waiting[0].status_code, waiting[0].json()["error"]["code"]) == (503, "draining")
        until(lambda: store.get(plain).status == "cancelled")
        api.thread.join(10)
        assert not api.thread.is_alive()
    assert store.get(job_id).status == "in_progress"


def test_one_that_was_replaced_ends_what_can_be_resumed_and_answers_the_rest(store, model):
    engine = ScriptedEngine(store)
    with running_api(store, model) as api:
        job_id = api.submit()
        engine.claim_one(job_id)
        engine.write(job_id, tokens=3)
        stream = Stream(api, job_id)
        until(lambda: len(stream.tokens) == 3)
        answers: list[httpx.Response] = []
        completion = {"model": "tiny", "prompt": PROMPT, "max_tokens": 2}
        ask = lambda: answers.append(httpx.post(f"{api.url}/v1/completions", json=completion, **DIRECT))  # noqa: E731
        waiting = threading.Thread(target=ask)
        waiting.start()
        plain = until(lambda: engine.claim())[0]
        api.retire()
        stream.wait()
        assert (stream.tokens, stream.names[-1]) == ([100, 101, 102], "in_progress")
        asked = api.client.post("/v1/jobs", json={"prompt": PROMPT})  # on the connection that was open already
        assert (asked.status_code, asked.headers["Connection"]) == (202, "close")
        with pytest.raises(httpx.ConnectError):  # here nobody else holds the port
            api.client.get("/readyz")
        engine.write(plain, tokens=2, end="length")
        waiting.join(10)
        assert answers[0].status_code == 200
        api.thread.join(10)
        assert not api.thread.is_alive()
    assert store.get(job_id).status == "in_progress"


def test_a_client_that_reads_nothing_does_not_hold_up_the_end(store, model):
    engine = ScriptedEngine(store)
    with running_api(store, model, close_loop=False) as api:
        job_id = api.submit(max_tokens=500)
        engine.claim_one(job_id)
        with socket.create_connection(("127.0.0.1", int(api.url.rpartition(":")[2]))) as stuck:
            stuck.sendall(f"GET /v1/jobs/{job_id}/events HTTP/1.1\r\nHost: x\r\n\r\n".encode())
            for _ in range(10):
                engine.write(job_id, tokens=50, texts=["x" * 20_000] * 50)
            time.sleep(0.2)
            began = time.monotonic()
            api.drain()
            api.thread.join(15)
            assert not api.thread.is_alive()
            assert time.monotonic() - began < 12


SERVER = """
import sys
from prometheus_client import CollectorRegistry
from pathlib import Path
from service.api.context import ApiOptions, Context
from service.api.server import serve
from service.listening import bind
from storage.memory_store import MemoryJobStore
from storage.records import NewJob
from tests.service.api.rig import served_model
store = MemoryJobStore()
store.bind(store.create("test"))
sock = bind("127.0.0.1", int(sys.argv[1]))
serve(Context(served_model(Path(sys.argv[2])), lambda: store, ApiOptions(), CollectorRegistry()), sock)
assert "torch" not in sys.modules and "transformers" not in sys.modules
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_process_with_0(model_folder, number):
    """And to the last it has not imported torch."""
    with bind("127.0.0.1", 0) as sock:
        port = sock.getsockname()[1]
    process = subprocess.Popen([sys.executable, "-c", SERVER, str(port), str(model_folder)], env={**os.environ, "PYTHONPATH": "."})
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", **DIRECT) as client:
            until(lambda: _live(client), 20)
            job_id = client.post("/v1/jobs", json={"prompt": PROMPT}).json()["id"]
            with client.stream("GET", f"/v1/jobs/{job_id}/events") as response:
                lines = response.iter_lines()
                next(lines)
                began = time.monotonic()
                process.send_signal(number)
                assert "done" not in "".join(lines)
        assert process.wait(20) == 0
        assert time.monotonic() - began < 10
    finally:
        process.kill()
        process.wait()


def _live(client):
    try:
        return client.get("/livez").status_code == 200
    except httpx.TransportError:
        return False


def test_a_taken_port_is_refused_in_words():
    with bind("127.0.0.1", 0) as sock:
        sock.listen()
        port = sock.getsockname()[1]
        with pytest.raises(PortInUse, match=f"port {port}.*--port"):
            bind("127.0.0.1", port)


def test_a_clock_step_is_said_once_a_minute_and_not_at_each_look(model):
    """Each look that went well forgot what had been said, so the same refusal was logged every second."""
    now = [1e9]
    store = MemoryJobStore(clock=lambda: now[0])
    store.bind(store.create("test"))
    for number in range(12):
        store.submit(NewJob(f"job-{number}", "{}", (1,), model.fingerprint, 9, "hash"), queue_limit=99)
        store.cancel(f"job-{number}")
    now[0] += 100
    options = ApiOptions(retention_seconds=50, max_purges=5)
    background = Background(Context(model, Source(store, None), options, CollectorRegistry(), None))
    with structlog.testing.capture_logs() as lines:
        for _ in range(3):
            background.sweep()
    assert [line["event"] for line in lines] == ["sweep_refused"]
