"""What both stores promise of files and batches (storage/batch_store.py, PROTOCOL.md 10)."""

import pytest

from storage.batch_records import BatchError, BatchOutput, BatchStatus, ChunkOutcome, CreateOutcome, FeedOutcome, NewFile
from storage.errors import StorageError
from storage.job_store import JobStore
from storage.records import Finish, JobError, JobStatus
from storage.rules import UPLOAD_IDLE
from tests.storage.backends import FILE_ROOM, LIMIT, Backend, EngineUnderTest, line_of, new_batch, submit, upload

STOP = Finish(JobStatus.COMPLETED, "stop")
FAIL = Finish(JobStatus.FAILED, error=JobError("engine_error", "NaN"))


def begun(store: JobStore, total: int, **values):
    upload(store)
    assert new_batch(store, **values).outcome is CreateOutcome.CREATED
    return store.batches.begin_batch("batch-1", total, [])


def feed(store: JobStore, *lines, window: int = 100, **limits):
    return store.batches.feed("batch-1", lines, window=window, **{"queue_limit": LIMIT, **limits})


def batch_of(store: JobStore, batch_id: str = "batch-1"):
    record = store.batches.batch(batch_id)
    assert record is not None
    return record


def counts(store: JobStore):
    record = batch_of(store)
    return record.completed, record.failed, record.status


def content_of(store: JobStore, file_id: str = "file-1") -> bytes:
    record = store.batches.file(file_id)
    chunks = [store.batches.chunk(record, number) for number in range(record.chunks)]
    return b"".join(chunks)


@pytest.fixture(autouse=True)
def nothing_is_out_of_place(backend: Backend):
    yield
    assert backend.leftovers() == []


class TestFiles:
    def test_what_was_sent_comes_back_byte_for_byte(self, store: JobStore):
        content = bytes(range(256)) * 5 + "Zwölf 你好".encode()
        made = upload(store, content=content)
        assert made.outcome is CreateOutcome.CREATED
        assert made.record == store.batches.file("file-1")
        assert (made.record.num_bytes, made.record.filename) == (len(content), "in.jsonl")
        assert content_of(store) == content

    def test_there_is_no_file_before_the_last_call(self, store: JobStore):
        store.batches.put_chunk("u", 0, b"x", limit=FILE_ROOM)
        assert store.batches.file("u") is None
        assert store.batches.files("", limit=10).files == ()

    def test_each_call_may_be_sent_twice(self, store: JobStore):
        for _ in range(2):
            assert store.batches.put_chunk("u", 0, b"12345", limit=5) is ChunkOutcome.OK
        new = NewFile("f", "u", 1, 5, "sha", "name")
        made = store.batches.create_file(new, limit=1)
        again = store.batches.create_file(new, limit=1)
        assert (made.outcome, again.outcome, again.record) == (CreateOutcome.CREATED, CreateOutcome.EXISTS, made.record)
        assert store.batches.put_chunk("u", 0, b"other", limit=100) is ChunkOutcome.CLOSED
        assert store.batches.chunk(made.record, 0) == b"12345"

    def test_two_uploads_of_one_id_do_not_mix(self, store: JobStore):
        first = upload(store, content=b"first", upload_id="a")
        second = upload(store, content=b"other", upload_id="b")
        assert (second.outcome, second.record) == (CreateOutcome.EXISTS, first.record)
        assert store.batches.drop_upload("b")
        assert not store.batches.drop_upload("a")
        assert content_of(store) == b"first"

    def test_all_files_together_have_a_limit_and_a_deleted_one_makes_room(self, store: JobStore):
        upload(store, content=b"12345")
        assert store.batches.put_chunk("u", 0, b"123456", limit=10) is ChunkOutcome.FULL
        assert store.batches.delete_file("file-1")
        assert not store.batches.delete_file("file-1")
        assert store.batches.file("file-1") is None
        assert store.batches.put_chunk("u", 0, b"1234567890", limit=10) is ChunkOutcome.OK
        assert store.batches.drop_upload("u")
        assert store.batches.put_chunk("v", 0, b"1234567890", limit=10) is ChunkOutcome.OK

    def test_a_tenant_has_a_limit_of_files(self, store: JobStore):
        for i in range(2):
            store.batches.put_chunk(f"u{i}", 0, b"x", limit=FILE_ROOM)
        store.batches.create_file(NewFile("a", "u0", 1, 1, "sha", "x", tenant="t"), limit=1)
        second = store.batches.create_file(NewFile("b", "u1", 1, 1, "sha", "x", tenant="t"), limit=1)
        assert second.outcome is CreateOutcome.FULL

    def test_lists_are_a_tenant_s_own_newest_first(self, store: JobStore):
        for i in range(5):
            upload(store, f"f{i}", tenant="t")
        upload(store, "other", tenant="u")
        page = store.batches.files("t", limit=3)
        assert ([file.file_id for file in page.files], page.more) == (["f4", "f3", "f2"], True)
        rest = store.batches.files("t", limit=3, before=page.files[-1].order)
        assert ([file.file_id for file in rest.files], rest.more) == (["f1", "f0"], False)

    def test_dead_uploads_and_old_files_go(self, store: JobStore, backend: Backend):
        upload(store, "used")
        new_batch(store, file_id="used")
        upload(store, "old")
        store.batches.put_chunk("dead", 0, b"x", limit=FILE_ROOM)
        backend.advance(UPLOAD_IDLE + 1)
        store.batches.put_chunk("alive", 0, b"x", limit=FILE_ROOM)
        assert store.batches.sweep_files(10 * UPLOAD_IDLE) == 1
        assert store.batches.create_file(NewFile("f", "dead", 1, 1, "sha", "x"), limit=9).outcome is CreateOutcome.INCOMPLETE
        assert store.batches.create_file(NewFile("f", "alive", 1, 1, "sha", "x"), limit=9).outcome is CreateOutcome.CREATED
        assert store.batches.sweep_files(UPLOAD_IDLE) == 1
        assert (store.batches.file("old"), content_of(store, "used")) == (None, b"one\ntwo\n")

    def test_a_sweep_that_would_remove_too_much_says_so(self, store: JobStore, backend: Backend):
        for i in range(6):
            upload(store, f"f{i}")
        backend.advance(100)
        with pytest.raises(StorageError, match="clock step"):
            store.batches.sweep_files(50, limit=5)


class TestBatches:
    def test_a_new_one_is_to_be_validated(self, store: JobStore):
        upload(store)
        made = new_batch(store, metadata={"a": "b"}, request_id="r")
        assert (made.outcome, made.record) == (CreateOutcome.CREATED, batch_of(store))
        assert (made.record.status, made.record.metadata, made.record.request_id) == ("validating", {"a": "b"}, "r")
        assert made.record.expires_at - made.record.created_at == pytest.approx(86_400, abs=0.01)
        again = new_batch(store)
        assert (again.outcome, again.record) == (CreateOutcome.EXISTS, made.record)
        assert store.batches.live_batches() == [made.record]
        assert store.batches.counts()[BatchStatus.VALIDATING] == 1

    def test_it_needs_a_file_of_its_tenant(self, store: JobStore):
        upload(store, tenant="t")
        assert new_batch(store).outcome is CreateOutcome.NO_FILE
        assert new_batch(store, tenant="t").outcome is CreateOutcome.CREATED
        store.batches.delete_file("file-1")
        assert new_batch(store, "batch-2", tenant="t").outcome is CreateOutcome.NO_FILE

    def test_live_ones_have_a_limit(self, store: JobStore):
        upload(store)
        new_batch(store, "a")
        assert new_batch(store, "b", limit=1).outcome is CreateOutcome.FULL
        store.batches.begin_batch("a", 0, [BatchError("empty_file", "no line")])
        assert new_batch(store, "b", limit=1).outcome is CreateOutcome.CREATED

    def test_validation_ends_once(self, store: JobStore):
        upload(store)
        new_batch(store)
        failed = store.batches.begin_batch("batch-1", 3, [BatchError("invalid_json_line", "no JSON", None, 2)])
        assert (failed.status, failed.total, failed.errors[0].line) == ("failed", 3, 2)
        assert store.batches.begin_batch("batch-1", 3, []) == failed
        assert set(failed.reached) == {BatchStatus.FAILED}
        assert store.batches.live_batches() == []
        assert store.batches.begin_batch("nobody", 3, []) is None

    def test_each_line_is_fed_once_in_order(self, store: JobStore):
        begun(store, 4)
        assert feed(store, line_of(2)) == [FeedOutcome.GAP]
        assert feed(store, line_of(1), line_of(2)) == [FeedOutcome.OK] * 2
        assert feed(store, line_of(1), line_of(2), line_of(3)) == [FeedOutcome.PASSED, FeedOutcome.PASSED, FeedOutcome.OK]
        assert (batch_of(store).fed, batch_of(store).position) == (3, 30)
        assert [job.job_id for job in store.jobs().jobs] == [f"line-batch-1-{i}" for i in (3, 2, 1)]
        assert {job.batch for job in store.jobs().jobs} == {"batch-1"}
        assert feed(store) == []
        assert store.batches.feed("nobody", [line_of(1)], window=9, queue_limit=9) == [FeedOutcome.GONE]

    def test_a_window_and_the_queue_bound_what_is_under_way(self, store: JobStore, engine: EngineUnderTest):
        begun(store, 9)
        assert feed(store, *map(line_of, (1, 2, 3)), window=2) == [FeedOutcome.OK, FeedOutcome.OK, FeedOutcome.AHEAD]
        assert feed(store, line_of(3), queue_limit=2) == [FeedOutcome.FULL]
        assert feed(store, line_of(3), tenant_limit=2) == [FeedOutcome.TENANT_FULL]
        engine.claim(limit=1)
        engine.commit("line-batch-1-1", 1, finish=STOP)
        assert feed(store, line_of(3), window=2, queue_limit=2) == [FeedOutcome.OK]

    def test_nothing_is_fed_before_and_after(self, store: JobStore):
        upload(store)
        new_batch(store)
        assert feed(store, line_of(1)) == [FeedOutcome.CLOSED]
        store.batches.begin_batch("batch-1", 2, [])
        store.batches.cancel_batch("batch-1")
        assert feed(store, line_of(1)) == [FeedOutcome.CLOSED]

    def test_counts_are_exact_at_every_moment(self, store: JobStore, engine: EngineUnderTest):
        begun(store, 4)
        feed(store, *map(line_of, (1, 2, 3)))
        engine.claim()
        seen = [counts(store)]
        engine.commit("line-batch-1-2", 1, finish=STOP)
        seen.append(counts(store))
        engine.commit("line-batch-1-1", 1, finish=FAIL)
        seen.append(counts(store))
        store.cancel("line-batch-1-3")
        seen.append(counts(store))
        assert seen == [(0, 0, "in_progress"), (1, 0, "in_progress"), (1, 1, "in_progress"), (1, 2, "in_progress")]
        feed(store, line_of(4))
        engine.claim()
        engine.commit("line-batch-1-4", 1, 2, finish=Finish(JobStatus.INCOMPLETE, "length"))
        record = batch_of(store)
        assert (record.completed, record.failed, record.status) == (2, 2, "completed")
        assert {"in_progress", "finalizing", "completed"} == set(record.reached)
        assert store.batches.live_batches() == []
        assert not store.batches.advance_batch("batch-1")

    def test_a_retry_of_a_finish_counts_once(self, store: JobStore, engine: EngineUnderTest):
        begun(store, 2)
        feed(store, line_of(1))
        engine.claim()
        for _ in range(2):
            engine.commit("line-batch-1-1", 1, finish=STOP)
        assert counts(store) == (1, 0, "in_progress")

    def test_a_line_of_choices_is_one_line(self, store: JobStore, engine: EngineUnderTest):
        begun(store, 2)
        feed(store, line_of(1, choices=3), line_of(2, choices=2))
        engine.claim()
        for job_id in ("line-batch-1-1", "line-batch-1-1-2", "line-batch-1-2-1"):
            engine.commit(job_id, 1, finish=STOP)
        assert counts(store) == (0, 0, "in_progress")
        engine.commit("line-batch-1-1-1", 1, finish=STOP)
        assert counts(store) == (1, 0, "in_progress")
        engine.commit("line-batch-1-2", 1, finish=FAIL)
        assert counts(store) == (1, 1, "completed")

    def test_a_line_of_which_no_job_can_be_made_has_failed(self, store: JobStore):
        begun(store, 2)
        error = JobError("job_too_large", "no engine can hold it")
        assert feed(store, line_of(1, error=error), line_of(2, error=error), queue_limit=0) == [FeedOutcome.OK] * 2
        assert counts(store) == (0, 2, "completed")
        assert store.get("line-batch-1-1").error == error

    def test_cancelling_ends_what_runs_and_counts_what_never_ran(self, store: JobStore, engine: EngineUnderTest):
        begun(store, 200)
        feed(store, *map(line_of, range(1, 71)))
        engine.claim(limit=1)
        engine.commit("line-batch-1-1", 1, finish=STOP)
        record = store.batches.cancel_batch("batch-1")
        assert (record.status, record.failed) == ("cancelling", 0)
        assert store.batches.cancel_batch("batch-1") == record
        assert store.batches.advance_batch("batch-1")
        assert counts(store) == (1, 64, "cancelling")
        assert store.batches.advance_batch("batch-1")
        assert counts(store) == (1, 199, "cancelled")
        assert not store.batches.advance_batch("batch-1")
        assert store.counts()[JobStatus.CANCELLED] == 69
        assert store.batches.cancel_batch("batch-1") == batch_of(store)

    def test_one_that_is_validated_can_be_cancelled(self, store: JobStore):
        upload(store)
        new_batch(store)
        store.batches.cancel_batch("batch-1")
        assert store.batches.begin_batch("batch-1", 3, []).status == "cancelling"
        store.batches.advance_batch("batch-1")
        assert counts(store) == (0, 0, "cancelled")

    def test_it_expires_with_what_is_finished_kept(self, store: JobStore, engine: EngineUnderTest, backend: Backend):
        begun(store, 3, window_seconds=50.0)
        feed(store, line_of(1), line_of(2))
        engine.claim()
        engine.commit("line-batch-1-1", 1, finish=STOP)
        assert not store.batches.advance_batch("batch-1")
        backend.advance(51)
        assert store.batches.advance_batch("batch-1")
        assert counts(store) == (1, 2, "expired")
        assert store.get("line-batch-1-2").error.code == "batch_expired"
        assert store.get("line-batch-1-1").status is JobStatus.COMPLETED

    def test_a_job_deleted_by_itself_has_no_answer_any_more(self, store: JobStore, engine: EngineUnderTest):
        begun(store, 3)
        feed(store, line_of(1), line_of(2, choices=2))
        engine.claim()
        engine.commit("line-batch-1-1", 1, finish=STOP)
        for job_id in ("line-batch-1-2", "line-batch-1-2-1"):
            engine.commit(job_id, 1, finish=STOP)
        assert counts(store) == (2, 0, "in_progress")
        assert store.delete("line-batch-1-2", "line-batch-1-2-1") == 2
        assert counts(store) == (1, 1, "in_progress")
        feed(store, line_of(3))
        store.delete("line-batch-1-3")
        assert counts(store) == (1, 2, "completed")
        store.delete("line-batch-1-3")
        assert counts(store) == (1, 2, "completed")

    def test_lists_are_a_tenant_s_own_newest_first(self, store: JobStore):
        upload(store, tenant="t")
        for i in range(3):
            new_batch(store, f"b{i}", tenant="t")
        page = store.batches.batch_page("t", limit=2)
        assert ([batch.batch_id for batch in page.batches], page.more) == (["b2", "b1"], True)
        rest = store.batches.batch_page("t", limit=2, before=page.batches[-1].order)
        assert ([batch.batch_id for batch in rest.batches], rest.more) == (["b0"], False)
        assert store.batches.batch_page("", limit=2).batches == ()


class TestRetention:
    def ended(self, store: JobStore, engine: EngineUnderTest, lines: int = 3):
        begun(store, lines)
        feed(store, *map(line_of, range(1, lines + 1)))
        for job in engine.claim(limit=lines):
            engine.commit(job.job_id, 1, finish=STOP)
        assert counts(store) == (lines, 0, "completed")

    def test_jobs_and_input_go_with_their_batch(self, store: JobStore, engine: EngineUnderTest, backend: Backend):
        self.ended(store, engine)
        submit(store, "alone")
        backend.advance(1000)
        assert store.sweep_expired(50) == 0
        assert store.batches.sweep_files(50) == 0
        assert store.batches.sweep_batches(2000) == 0
        assert store.batches.sweep_batches(50) == 3
        assert (store.batches.batch("batch-1"), store.batches.file("file-1")) == (None, None)
        assert [job.job_id for job in store.jobs().jobs] == ["alone"]
        assert sum(store.batches.counts().values()) == 0
        assert store.batches.sweep_batches(50) == 0

    def test_in_steps_and_seen_by_nobody_in_between(self, store: JobStore, engine: EngineUnderTest, backend: Backend):
        self.ended(store, engine, 5)
        backend.advance(1000)
        assert store.batches.sweep_batches(50, limit=2) == 2
        assert store.batches.batch("batch-1") is None
        assert store.batches.batch_page("", limit=9).batches == ()
        assert store.batches.cancel_batch("batch-1") is None
        assert sum(store.batches.counts().values()) == 0
        assert backend.leftovers() == []
        assert [store.batches.sweep_batches(50, limit=2) for _ in range(3)] == [2, 1, 0]
        assert store.jobs().jobs == ()

    def test_a_file_stays_as_long_as_a_batch_needs_it(self, store: JobStore, engine: EngineUnderTest, backend: Backend):
        self.ended(store, engine)
        new_batch(store, "batch-2")
        file = store.batches.file("file-1")
        assert store.batches.delete_file("file-1")
        assert (store.batches.file("file-1"), store.batches.files("", limit=9).files) == (None, ())
        assert store.batches.input_file("batch-1") == file
        backend.advance(1000)
        store.batches.sweep_batches(50)
        assert store.batches.input_file("batch-1") is None
        assert store.batches.input_file("batch-2").upload_id == file.upload_id
        assert store.batches.chunk(file, 0) == b"one\nt"
        store.batches.begin_batch("batch-2", 0, [BatchError("empty_file", "no line")])
        backend.advance(1000)
        store.batches.sweep_batches(50)
        assert store.batches.chunk(file, 0) is None

    def test_a_deleted_output_is_marked_once(self, store: JobStore, engine: EngineUnderTest, backend: Backend):
        self.ended(store, engine)
        assert batch_of(store).deleted == frozenset()
        for which in BatchOutput:
            assert store.batches.delete_output("batch-1", which)
            assert not store.batches.delete_output("batch-1", which)
            assert which in batch_of(store).deleted
        assert not store.batches.delete_output("batch-2", BatchOutput.OUTPUT)
        backend.advance(1000)
        store.batches.sweep_batches(50, limit=1)
        assert not store.batches.delete_output("batch-1", BatchOutput.OUTPUT)
        assert backend.leftovers() == []

    def test_one_that_is_read_stays(self, store: JobStore, engine: EngineUnderTest, backend: Backend):
        self.ended(store, engine)
        backend.advance(1000)
        store.batches.touch_batch("batch-1")
        assert store.batches.sweep_batches(50) == 0
        backend.advance(300)
        assert store.batches.sweep_batches(50) == 0
        backend.advance(100)
        assert store.batches.sweep_batches(50) == 3
