"""A plain request's jobs end with the api that serves it, and no others do."""

import os
import signal
import subprocess
import sys
import threading
import time

import httpx
import pytest

from service.listening import bind
from storage.errors import StoreUnavailable
from storage.records import JobStatus
from tests.service.api.conftest import new_memory_store, open_redis_store
from tests.service.api.rig import DIRECT, MODEL, PROMPT, ScriptedEngine, parse_events, running_api, until

LEASE = 1.8
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 20}
TEXT = {"model": MODEL, "prompt": PROMPT, "max_tokens": 20}

SERVER = """
import sys
from pathlib import Path
from prometheus_client import CollectorRegistry
from service.api.context import ApiOptions, Context
from service.api.server import serve
from service.listening import bind
from storage.redis_store import RedisJobStore
from tests.service.api.rig import served_model
store = RedisJobStore(sys.argv[1])
store.bind(store.identity())
sock = bind("127.0.0.1", int(sys.argv[2]))
serve(Context(served_model(Path(sys.argv[3])), lambda: store, ApiOptions(), CollectorRegistry()), sock)
"""


class Client:
    """Asks in a thread, and keeps what it is answered for as long as somebody answers."""

    def __init__(self, url, path, body, headers=None):
        self.lines = []
        self._request = (f"{url}{path}", body, headers)
        self.thread = threading.Thread(target=self._ask, daemon=True)
        self.thread.start()

    def _ask(self):
        url, body, headers = self._request
        try:
            with (
                httpx.Client(timeout=30, **DIRECT) as client,
                client.stream("POST", url, json=body, headers=headers) as response,
            ):
                self.lines.extend(response.iter_lines())
        except httpx.TransportError:
            pass  # it was killed


@pytest.fixture
def redis_store(valkey):
    store = open_redis_store(valkey)
    yield store
    store.close()


@pytest.fixture
def process(redis_store, valkey, model_folder):
    """A real api, and where it is."""
    with bind("127.0.0.1", 0) as sock:
        port = sock.getsockname()[1]
    command = [sys.executable, "-c", SERVER, valkey.url, str(port), str(model_folder)]
    running = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": "."})
    url = f"http://127.0.0.1:{port}"
    with httpx.Client(**DIRECT) as client:
        until(lambda: _lives(client, url), 30)
    yield running, url
    running.kill()
    running.wait()


def _lives(client, url):
    try:
        return client.get(f"{url}/livez").status_code == 200
    except httpx.TransportError:
        return False


def statuses(store):
    """By job, oldest first."""
    return {record.job_id: record.status for record in reversed(store.jobs(tenant=None, limit=100).jobs)}


def test_an_api_that_is_killed_takes_its_plain_jobs_along(process, redis_store, model):
    """Streamed and not, waiting and running. Those in the background, with a key, and native ones go on to their end."""
    running, url = process
    engine = ScriptedEngine(redis_store)
    clients = []

    def ask(path, body, headers=None, *, choices=1):
        known = set(statuses(redis_store))
        clients.append(Client(url, path, body, headers))
        return list(until(lambda: len(made := set(statuses(redis_store)) - known) == choices and made))

    plain = ask("/v1/chat/completions", {**CHAT, "stream": True})
    plain += ask("/v1/completions", {**TEXT, "n": 2}, choices=2)
    plain += ask("/v1/responses", {"model": MODEL, "input": "hi"})
    (unstored,) = ask("/v1/responses", {"model": MODEL, "input": "hi", "store": False, "stream": True})
    others = ask("/v1/responses", {"model": MODEL, "input": "hi", "background": True})
    others += ask("/v1/chat/completions", {**CHAT, "stream": True}, {"Idempotency-Key": "k"})
    others += ask("/v1/jobs", {"prompt": PROMPT, "max_tokens": 20})
    engine.claim()
    engine.write(plain[0], *others)
    plain += ask("/v1/completions", TEXT)  # nobody computes this one
    running.send_signal(signal.SIGKILL)
    with running_api(redis_store, model, api_lease_seconds=LEASE):
        time.sleep(0.5 * LEASE)
        assert not any(status.terminal for status in statuses(redis_store).values()), "too early to judge"
        until(lambda: redis_store.apis() == [], 10 * LEASE)
        ended = statuses(redis_store)
        assert [ended.pop(job_id) for job_id in plain] == [JobStatus.CANCELLED] * 5
        assert unstored not in ended
        assert ended == dict.fromkeys(others, JobStatus.IN_PROGRESS)
        engine.write(*others, tokens=3, end="stop")
        assert [redis_store.get(job_id).status for job_id in others] == [JobStatus.COMPLETED] * 3


def test_an_api_that_lives_keeps_its_jobs_for_as_long_as_they_take(store, model):
    """Also one that had nothing to beat for, for longer than a lease, and then has."""
    options = {"api_lease_seconds": LEASE}
    with running_api(store, model, **options) as api, running_api(store, model, **options):
        for _ in range(2):
            client = Client(api.url, "/v1/completions", {**TEXT, "stream": True})
            (served,) = until(store.apis)
            time.sleep(2 * LEASE)
            assert [each.job_ids for each in store.apis()] == [served.job_ids]
            store.fail(served.job_ids[0], "code", "message")
            client.thread.join(10)
            assert store.apis() == []
            time.sleep(1.5 * LEASE)


def test_an_outage_is_nobodys_death(model):
    store = new_memory_store()
    options = {"api_lease_seconds": LEASE}
    with running_api(store, model, **options) as api, running_api(store, model, **options) as other:
        engine, client = ScriptedEngine(store), Client(api.url, "/v1/completions", {**TEXT, "stream": True})
        (served,) = until(store.apis)
        engine.claim()
        engine.write(*served.job_ids)
        until(lambda: client.lines)  # a stream that could not begin would be refused
        for each in (api, other):
            each.source.error = StoreUnavailable("away")
        time.sleep(1.5 * LEASE)
        for each in (other, api):
            each.source.error = None
            time.sleep(LEASE / 4)
        time.sleep(LEASE)
        engine.write(*served.job_ids, end="stop")
        assert store.get(served.job_ids[0]).status is JobStatus.COMPLETED


def test_a_client_of_an_api_that_was_cut_off_is_told_that_its_job_was_cancelled(model):
    """And not left with an answer that looks whole."""
    store = new_memory_store()
    with running_api(store, model) as api, running_api(store, model, api_lease_seconds=LEASE):
        engine = ScriptedEngine(store)
        client = Client(api.url, "/v1/completions", {**TEXT, "stream": True})
        (served,) = until(store.apis)
        engine.claim()
        engine.write(*served.job_ids, tokens=3)
        until(lambda: "t2 " in "".join(client.lines))
        api.source.error = StoreUnavailable("cut off")
        until(lambda: store.get(served.job_ids[0]).status is JobStatus.CANCELLED, 10 * LEASE)
        api.source.error = None
        client.thread.join(10)
        told = [event.data for event in parse_events(client.lines)]
        assert told[-2]["error"]["code"] == "job_cancelled"
        assert not any(choice["finish_reason"] for event in told for choice in event.get("choices", ()))
