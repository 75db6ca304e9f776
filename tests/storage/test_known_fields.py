"""What is remembered of job records is bounded by bytes."""

import sys
import threading

from storage.known_fields import KnownFields
from storage.records import LogRead
from tests.storage.backends import EngineUnderTest, RedisBackend, bound, submit

LENGTH = 1000


def test_what_changes_is_not_kept():
    known = KnownFields(1 << 20)
    known.keep("job", 1, {"prompt": "1 2", "status": "queued"})
    assert known.get("job", 1) == {"prompt": "1 2"}


def test_another_order_is_another_job():
    known = KnownFields(1 << 20)
    known.keep("job", 1, {"prompt": "1"})
    assert known.get("job", 2) is None


def test_many_short_jobs_or_few_long_ones():
    prompt = "1" * 1000
    known = KnownFields(10 * (sys.getsizeof("prompt") + sys.getsizeof(prompt)))
    for order in range(15):
        known.keep("short", order, {"prompt": prompt})
    assert [order for order in range(15) if known.get("short", order)] == list(range(5, 15))
    known.keep("long", 0, {"prompt": "1" * 7500})
    assert known.get("long", 0) is not None
    assert [order for order in range(15) if known.get("short", order)] == [12, 13, 14]


def test_a_job_that_is_read_again_is_counted_once_and_goes_last():
    prompt = "1" * 1000
    known = KnownFields(2 * (sys.getsizeof("prompt") + sys.getsizeof(prompt)))
    for order in (0, 1, 0, 0, 2):
        known.keep("job", order, {"prompt": prompt})
    assert [known.get("job", order) is not None for order in range(3)] == [True, False, True]


def test_the_newest_is_kept_whatever_its_size():
    known = KnownFields(0)
    for order in range(3):
        known.keep("job", order, {"prompt": "1" * 1000})
    assert len(known) == 1
    assert known.get("job", 2) is not None


def test_a_first_look_at_a_job_that_is_being_written_shows_one_moment(valkey):
    """Found by the chaos scenario stale_at_points: a finished job with the first forty of its fifty tokens.

    A reader that does not know a job asks for the rest of its record, behind its log, and that record was a later one.
    """
    backend = RedisBackend("first-look", valkey)
    try:
        store = bound(backend)
        engine = EngineUnderTest(store)
        engine.register()
        submit(store, max_tokens=LENGTH)
        engine.claim()
        writer = threading.Thread(target=lambda: [engine.commit("job-1", token) for token in range(LENGTH)])
        writer.start()
        while writer.is_alive():
            reader = bound(backend)
            (seen,) = reader.read([LogRead("job-1", 0, LENGTH)])
            assert len(seen.entries) >= seen.record.log_length
        writer.join()
    finally:
        backend.close()
