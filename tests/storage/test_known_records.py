"""What is remembered of job records is bounded by bytes, and never older than what was read."""

import threading

from storage.known_records import Known, KnownRecords
from storage.records import JobRecord, JobStatus, LogRead
from tests.storage.backends import EngineUnderTest, RedisBackend, bound, submit

LENGTH = 1000


def known(job_id="job", order=1, tokens=10):
    record = JobRecord(job_id, "{}", tuple(range(tokens)), "model", 8, JobStatus.QUEUED, order)
    return Known(record, (str(order),))


def left(records, count):
    return [number for number in range(count) if records.get(f"job-{number}", 1) is not None]


def test_another_order_is_another_job():
    records = KnownRecords(1 << 20)
    records.keep(known(order=1))
    assert records.get("job", 1) == known(order=1)
    assert records.get("job", 2) is None


def test_many_short_jobs_or_few_long_ones():
    records = KnownRecords(10 * known().size)
    for number in range(15):
        records.keep(known(f"job-{number}"))
    assert left(records, 15) == list(range(5, 15))
    records.keep(known("long", tokens=500))
    assert records.get("long", 1) is not None
    assert left(records, 15) == list(range(15 - len(records) + 1, 15))
    assert 1 < len(records) < 10


def test_a_job_that_is_read_again_is_counted_once_and_goes_last():
    records = KnownRecords(2 * known("job-0").size)
    for number in (0, 1, 0, 0, 2):
        records.keep(known(f"job-{number}"))
    assert left(records, 3) == [0, 2]


def test_the_newest_is_kept_whatever_its_size():
    records = KnownRecords(0)
    for number in range(3):
        records.keep(known(f"job-{number}", tokens=1000))
    assert len(records) == 1
    assert left(records, 3) == [2]


def test_a_record_that_is_read_again_is_the_one_that_is_read_anew(valkey):
    backend = RedisBackend("again", valkey)
    try:
        store, fresh = bound(backend), bound(backend)
        engine = EngineUnderTest(store)
        engine.register()
        submit(store)
        engine.claim()
        for token in range(5):
            (again,) = store.read([LogRead("job-1")])
            assert store.read([LogRead("job-1")])[0].record is again.record
            assert again.record == fresh.get("job-1")
            engine.commit("job-1", token)
        store.describe("job-1", '{"a":"b"}')
        store.cancel("job-1")
        assert store.read([LogRead("job-1")])[0].record == fresh.get("job-1")
    finally:
        backend.close()


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
