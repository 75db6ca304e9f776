"""The fsync boundary of the in-memory store."""

import pytest

from storage.errors import WrongStore
from storage.memory_store import MemoryJobStore
from storage.records import JobStatus, NewJob

JOB = NewJob("job", "{}", (1,), "model", 4, request_hash="")


def new_store():
    store = MemoryJobStore(clock=lambda: 1.8e9)
    store.bind(store.create("store"))
    store.submit(JOB, queue_limit=1)
    return store


def test_what_was_synced_survives_and_what_came_later_does_not():
    store = new_store()
    store.sync()
    synced = store.identity()
    store.cancel("job")
    assert store.identity().commit > synced.commit
    for _ in range(2):  # a crash does not use up what is on disk
        store.crash()
        assert store.identity() == synced
        assert store.get("job").status is JobStatus.QUEUED
        store.cancel("job")


def test_a_store_that_never_synced_comes_back_empty_and_is_refused():
    store = new_store()
    store.crash()
    assert store.identity() is None
    with pytest.raises(WrongStore):
        store.get("job")
