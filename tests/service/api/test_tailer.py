"""Who follows the logs goes on without hints, and does not read what does not change for ever."""

import asyncio
import contextlib
import time
from collections import Counter

import pytest
from prometheus_client import CollectorRegistry

from service.api.context import StoreCalls
from service.api.tailer import JOBS_PER_READ, Tailer
from service.metrics import ApiMetrics
from storage.job_spec import JobSpec
from storage.memory_store import MemoryJobStore
from tests.service.api.rig import FINGERPRINT, ScriptedEngine
from tests.storage.backends import submit

POLL = 0.1
MANY = 3 * JOBS_PER_READ


class CountingStore(MemoryJobStore):
    """``deaf``: no hint arrives."""

    def __init__(self) -> None:
        super().__init__()
        self.deaf = False
        self.reads: Counter[str] = Counter()
        self.rounds = 0

    def wait_hint(self, timeout, *, tokens=True):
        if not self.deaf:
            return super().wait_hint(timeout, tokens=tokens)
        time.sleep(timeout)
        return frozenset()

    def read(self, reads):
        self.rounds += 1
        self.reads.update(read.job_id for read in reads)
        return super().read(reads)


@pytest.fixture
def store():
    made = CountingStore()
    made.bind(made.create("test"))
    return made


@contextlib.asynccontextmanager
async def feeds_of(store, job_ids):
    tailer = Tailer(StoreCalls(lambda: store, ApiMetrics(CollectorRegistry())), POLL)
    tailer.start()
    try:
        yield {job_id: tailer.watch(job_id, 0, asyncio.Event()) for job_id in job_ids}
    finally:
        await tailer.stop()


def submitted(store, count):
    job_ids = [f"job-{number}" for number in range(count)]
    for job_id in job_ids:
        submit(store, job_id, model_fingerprint=FINGERPRINT, spec=JobSpec("tiny", 100, 0).to_json())
    return job_ids


async def until(condition, seconds=20):
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.01)


async def read_in_turn(store):
    """One round trip in each interval, and in two times as many as it takes every log is read twice."""
    store.reads.clear()
    store.rounds, began = 0, time.monotonic()
    rounds = 2 * MANY // JOBS_PER_READ
    await until(lambda: store.rounds == rounds)
    assert time.monotonic() - began > (rounds - 2) * POLL
    assert set(store.reads.values()) == {2}


def test_without_hints_every_log_is_followed(store):
    job_ids = submitted(store, MANY)
    engine = ScriptedEngine(store, device_pages=10_000)
    while engine.claim():
        pass
    store.deaf = True

    async def follow():
        async with feeds_of(store, job_ids) as feeds:
            for tokens in (1, 2):
                engine.write(*job_ids)
                await until(lambda: all(feed.end == tokens for feed in feeds.values()))  # noqa: B023

    asyncio.run(follow())


def test_logs_that_stand_still_are_read_in_turn(store):
    job_ids = submitted(store, MANY)

    async def follow():
        async with feeds_of(store, job_ids) as feeds:
            await until(lambda: all(feed.record is not None for feed in feeds.values()))
            await read_in_turn(store)

    asyncio.run(follow())


def test_an_end_is_news_once(store):
    """A client that reads slowly stays long after its job: it must not have all logs read every second."""
    job_ids = submitted(store, MANY)

    async def follow():
        async with feeds_of(store, job_ids) as feeds:
            await until(lambda: all(feed.record is not None for feed in feeds.values()))
            store.cancel("job-0")
            await until(lambda: feeds["job-0"].record.status.terminal)
            await until(lambda: store.reads["job-0"] >= 3)
            await read_in_turn(store)

    asyncio.run(follow())


def test_a_hint_is_followed_at_once_and_alone(store):
    job_ids = submitted(store, MANY)
    engine = ScriptedEngine(store, device_pages=10_000)
    while engine.claim():
        pass

    async def follow():
        async with feeds_of(store, job_ids) as feeds:
            await until(lambda: all(feed.record is not None for feed in feeds.values()))
            store.reads.clear()
            engine.write("job-7")
            await until(lambda: feeds["job-7"].end == 1)

    asyncio.run(follow())
    assert store.reads["job-7"] >= 1
    assert store.reads.total() <= JOBS_PER_READ + 2
