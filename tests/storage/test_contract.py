"""What both job stores promise (storage/job_store.py, PROTOCOL.md 2, 4, 7, 9)."""

import threading
from dataclasses import replace

import pytest

from storage import chain
from storage.errors import EngineDead, StorageError, WrongStore
from storage.job_store import JobStore
from storage.records import (
    Finish,
    JobAnswer,
    JobError,
    JobStatus,
    LogEntry,
    LogRead,
    OwnedJob,
    PageEntry,
    RegisterOutcome,
    StepWrites,
    StoreIdentity,
    SubmitOutcome,
)
from tests.storage.backends import Backend, EngineUnderTest, bound, commit_of, engine_info, new_job, tokens

LIMIT = 1000


def submit(store: JobStore, job_id: str = "job-1", **values) -> None:
    assert store.submit(new_job(job_id, **values), queue_limit=LIMIT).outcome is SubmitOutcome.CREATED


def status_of(store: JobStore, job_id: str = "job-1") -> JobStatus:
    record = store.get(job_id)
    assert record is not None
    return record.status


class TestIdentity:
    def test_an_empty_store_has_none_and_create_makes_it_once(self, backend: Backend):
        store = backend.client()
        assert store.identity() is None
        first = store.create("a")
        assert store.create("b") == first == store.identity() == StoreIdentity("a", 1, 0)

    def test_nothing_works_before_bind(self, backend: Backend):
        store = backend.client()
        store.create("a")
        with pytest.raises(WrongStore):
            store.get("job-1")

    def test_raise_epoch_requeues_and_voids_owners(self, store: JobStore, engine: EngineUnderTest):
        submit(store)
        engine.claim()
        engine.commit("job-1", 5)
        raised = store.raise_epoch()
        assert raised.epoch == 2
        with pytest.raises(WrongStore, match="accepted anew"):
            store.get("job-1")
        store.bind(raised)
        record = store.get("job-1")
        assert record is not None
        assert (record.status, record.log_length, record.engine_id) == (JobStatus.QUEUED, 1, "")
        with pytest.raises(EngineDead):
            engine.claim()
        engine.register("inc-2")
        assert [job.job_id for job in engine.claim()] == ["job-1"]
        assert store.get("job-1").recoveries == 1


class TestSubmit:
    def test_the_record_is_what_was_submitted(self, store: JobStore):
        job = new_job(priority=3, tenant="t", request_id="r", traceparent="p", group="g", served_by="s", deadline_seconds=5)
        store.submit(job, queue_limit=1)
        record = store.get("job-1")
        assert record is not None
        assert (record.spec, record.prompt_token_ids, record.model_fingerprint) == (job.spec, job.prompt_token_ids, "model-a")
        assert (record.priority, record.tenant, record.request_id, record.traceparent) == (3, "t", "r", "p")
        assert (record.group, record.served_by, record.max_tokens, record.order) == ("g", "s", 100, 1)
        assert record.chain == chain.start(job.spec, job.prompt_token_ids, "job-1")
        assert record.deadline_at == pytest.approx(record.created_at + 5)
        assert record.started_at is record.finished_at is record.error is None

    def test_its_own_retry_finds_itself(self, store: JobStore):
        submit(store)
        assert store.submit(new_job(), queue_limit=0).outcome is SubmitOutcome.EXISTS
        assert store.counts()[JobStatus.QUEUED] == 1

    def test_idempotency_key(self, store: JobStore):
        submit(store, idempotency_key="k")
        same = store.submit(new_job("job-2", idempotency_key="k"), queue_limit=0)
        assert (same.outcome, same.job_id) == (SubmitOutcome.EXISTS, "job-1")
        other = store.submit(new_job("job-3", idempotency_key="k", request_hash="other"), queue_limit=LIMIT)
        assert (other.outcome, other.job_id) == (SubmitOutcome.CONFLICT, "job-1")
        submit(store, "job-4", idempotency_key="k", tenant="another")
        submit(store, "job-5", idempotency_key="")

    def test_a_full_queue_refuses_and_keeps_nothing(self, store: JobStore):
        submit(store)
        refused = store.submit(new_job("job-2", idempotency_key="k"), queue_limit=1)
        assert refused.outcome is SubmitOutcome.FULL
        assert store.get("job-2") is None
        assert store.submit(new_job("job-2", idempotency_key="k"), queue_limit=2).outcome is SubmitOutcome.CREATED
        other_model = new_job("job-3", model_fingerprint="model-b")
        assert store.submit(other_model, queue_limit=1).outcome is SubmitOutcome.CREATED
        assert (store.queued("model-a"), store.queued("model-b")) == (2, 1)

    def test_text_of_any_language_and_no_prompt(self, store: JobStore):
        submit(store, spec='{"prompt":"héllo \\u0000 日本 🎈\n"}', prompt_token_ids=())
        assert store.get("job-1").spec == '{"prompt":"héllo \\u0000 日本 🎈\n"}'
        assert store.get("job-1").prompt_token_ids == ()


class TestQueue:
    def test_priority_first_then_order(self, store: JobStore, engine: EngineUnderTest):
        for job_id, priority in (("a", 0), ("b", 5), ("c", -100), ("d", 5), ("e", 100)):
            submit(store, job_id, priority=priority)
        assert [job.job_id for job in engine.claim()] == ["e", "b", "d", "a", "c"]

    def test_a_released_job_returns_to_its_place(self, store: JobStore, engine: EngineUnderTest):
        for job_id in "abc":
            submit(store, job_id)
        (first,) = engine.claim(limit=1)
        assert engine.release(first) == (JobAnswer.OK,)
        assert [job.job_id for job in engine.claim()] == ["a", "b", "c"]

    def test_only_jobs_of_the_engines_model(self, store: JobStore, engine: EngineUnderTest):
        submit(store, "other", model_fingerprint="model-b")
        assert engine.claim() == ()

    def test_what_fits_overtakes_what_does_not_for_thirty_seconds(
        self, backend: Backend, store: JobStore, engine: EngineUnderTest
    ):
        submit(store, "large", prompt_token_ids=tuple(range(160)))  # 11 pages to start
        submit(store, "small-1")  # 2 pages
        submit(store, "small-2")
        assert [job.job_id for job in engine.claim(free_pages=10, limit=1)] == ["small-1"]
        backend.advance(29)
        assert [job.job_id for job in engine.claim(held=("small-1",), free_pages=10, limit=1)] == ["small-2"]
        submit(store, "small-3")
        backend.advance(2)
        held = ("small-1", "small-2")
        assert engine.claim(held=held, free_pages=10) == ()
        assert [job.job_id for job in engine.claim(held=held, free_pages=14)] == ["large", "small-3"]

    def test_a_job_larger_than_the_pool_waits_for_another_engine(self, store: JobStore, engine: EngineUnderTest):
        submit(store, "huge", max_tokens=1600)  # 101 of 100 pages in the end
        submit(store, "fits", max_tokens=1591)  # exactly 100
        assert [job.job_id for job in engine.claim()] == ["fits"]
        large = EngineUnderTest(store, "engine-2", device_pages=200)
        large.register()
        assert [job.job_id for job in large.claim()] == ["huge"]

    def test_a_job_that_fills_the_whole_pool_can_start(self, store: JobStore):
        tiny = EngineUnderTest(store, device_pages=4)
        tiny.register()
        submit(store, prompt_token_ids=tuple(range(60)), max_tokens=5)  # 64 rows: 4 pages, though 4 + 1 by the rule
        assert len(tiny.claim(free_pages=4)) == 1

    def test_free_pages_are_shared_by_one_claim(self, store: JobStore, engine: EngineUnderTest):
        for job_id in "abc":
            submit(store, job_id)
        assert len(engine.claim(free_pages=5)) == 2

    def test_affinity_keeps_a_drained_job_for_its_engine(self, backend: Backend, store: JobStore, engine: EngineUnderTest):
        other = EngineUnderTest(store, "engine-2", "inc-x")
        other.register()
        submit(store)
        engine.release(*engine.claim(), affinity=True)
        assert other.claim() == ()
        backend.advance(31)
        (job,) = other.claim()
        assert (job.fence, job.strikes) == (2, 1)
        assert store.get("job-1").recoveries == 0

    def test_affinity_lets_the_next_life_take_it_at_once(self, store: JobStore, engine: EngineUnderTest):
        submit(store)
        engine.release(*engine.claim(), affinity=True)
        engine.register("inc-2")
        assert len(engine.claim()) == 1

    def test_handover_lets_anybody_take_it(self, store: JobStore, engine: EngineUnderTest):
        other = EngineUnderTest(store, "engine-2", "inc-x")
        other.register()
        submit(store)
        engine.release(*engine.claim(), affinity=False)
        assert len(other.claim()) == 1


class TestClaim:
    def test_a_claim_whose_reply_was_lost_is_answered_again(self, store: JobStore, engine: EngineUnderTest):
        submit(store)
        lost = engine.claim()
        assert engine.claim() == lost
        assert engine.claim(held=("job-1",)) == ()
        assert store.get("job-1").strikes == 1

    def test_lost_ones_come_first_and_count(self, store: JobStore, engine: EngineUnderTest):
        for job_id in "abc":
            submit(store, job_id)
        engine.claim(limit=1)
        assert [job.job_id for job in engine.claim(limit=2)] == ["a", "b"]

    def test_needs_the_registered_incarnation(self, store: JobStore, engine: EngineUnderTest):
        submit(store)
        engine.register("inc-2")
        engine.incarnation = "inc-1"
        with pytest.raises(EngineDead):
            engine.claim()
        with pytest.raises(EngineDead):
            EngineUnderTest(store, "never-registered").claim()

    def test_two_engines_never_get_the_same_job(self, backend: Backend, store: JobStore):
        for i in range(40):
            submit(store, f"job-{i:02}")
        got: dict[str, list[str]] = {}

        def work(name: str) -> None:
            client = backend.client()
            identity = client.identity()
            assert identity is not None
            client.bind(identity)
            mine = EngineUnderTest(client, name, f"inc-{name}")
            mine.register()
            got[name] = []
            for _ in range(30):
                got[name] += [job.job_id for job in mine.claim(held=tuple(got[name]), limit=2)]

        threads = [threading.Thread(target=work, args=(name,)) for name in ("engine-1", "engine-2")]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        taken = got["engine-1"] + got["engine-2"]
        assert sorted(taken) == [f"job-{i:02}" for i in range(40)]


class TestCommit:
    def test_tokens_are_read_back_as_committed(self, store: JobStore, engine: EngineUnderTest):
        submit(store)
        engine.claim()
        record = store.get("job-1")
        entries = (LogEntry(7, "a\n "), LogEntry(0, "", '[{"token":1}]'), LogEntry(151_000, "日本🎈"))
        assert engine.write(replace(commit_of(record, 7, 0, 151_000), tokens=entries)).commits == (JobAnswer.OK,)
        (whole,) = store.read([LogRead("job-1")])
        assert (whole.entries, whole.record.log_length, whole.after) == (entries, 3, 0)
        (part,) = store.read([LogRead("job-1", after=1, limit=1)])
        assert part.entries == entries[1:2]
        beyond, missing = store.read([LogRead("job-1", after=9), LogRead("nobody")])
        assert (beyond.entries, missing) == ((), None)

    def test_answers_in_the_order_of_the_protocol(self, store: JobStore, engine: EngineUnderTest):
        submit(store)
        (job,) = engine.claim()
        record = store.get("job-1")
        first = commit_of(record, 5, 6)
        assert engine.write(first).commits == (JobAnswer.OK,)
        assert engine.write(first).commits == (JobAnswer.ALREADY,)
        assert engine.write(commit_of(record, 5, 7)).commits == (JobAnswer.GAP,)
        now = store.get("job-1")
        assert engine.write(commit_of(replace(now, log_length=9), 1)).commits == (JobAnswer.GAP,)
        assert engine.write(commit_of(now, 1, fence=job.fence + 1)).commits == (JobAnswer.FENCED,)
        assert engine.write(replace(first, job_id="nobody")).commits == (JobAnswer.GONE,)
        assert store.get("nobody") is None
        store.cancel("job-1")
        assert engine.write(first).commits == (JobAnswer.TERMINAL,)
        assert engine.write(commit_of(now, 1, fence=99)).commits == (JobAnswer.TERMINAL,)

    def test_finish_keeps_its_owner_and_recognises_its_retry(self, store: JobStore, engine: EngineUnderTest):
        submit(store)
        engine.claim()
        last = commit_of(store.get("job-1"), 5, finish=Finish(JobStatus.COMPLETED, "stop"))
        assert engine.write(last).commits == (JobAnswer.OK,)
        assert engine.write(last).commits == (JobAnswer.ALREADY,)
        record = store.get("job-1")
        assert (record.status, record.finish_reason, record.engine_id) == (JobStatus.COMPLETED, "stop", "engine-1")
        assert record.finished_at is not None
        assert engine.write(replace(last, finish=None)).commits == (JobAnswer.TERMINAL,)
        assert engine.write(replace(last, finish=Finish(JobStatus.INCOMPLETE, "length"))).commits == (JobAnswer.TERMINAL,)
        assert engine.renew().owned == ()
        assert store.cancel("job-1") == record

    def test_finish_without_tokens(self, store: JobStore, engine: EngineUnderTest):
        submit(store)
        engine.claim()
        error = JobError("engine_error", "logits were NaN")
        assert engine.commit("job-1", finish=Finish(JobStatus.FAILED, error=error)) is JobAnswer.OK
        assert store.get("job-1").error == error

    def test_counters_alone_are_added_once(self, store: JobStore, engine: EngineUnderTest):
        submit(store)
        engine.claim()
        only = commit_of(
            store.get("job-1"), cached_tokens=16, tokens_replayed=3, pages_restored=2, arithmetic_fingerprint="cpu-1"
        )
        assert engine.write(only).commits == (JobAnswer.OK,)
        assert engine.write(only).commits == (JobAnswer.ALREADY,)
        engine.commit("job-1", 5, tokens_replayed=4, arithmetic_fingerprint="cpu-2")
        record = store.get("job-1")
        assert (record.cached_tokens, record.tokens_replayed, record.pages_restored) == (16, 7, 2)
        assert record.arithmetic_fingerprint == "cpu-1"

    def test_a_step_of_many_jobs_is_answered_job_by_job(self, store: JobStore, engine: EngineUnderTest):
        for job_id in "abc":
            submit(store, job_id)
        engine.claim()
        commits = [commit_of(store.get(job_id), 1) for job_id in "abc"]
        commits[1] = replace(commits[1], fence=9)
        before = store.identity().commit
        answers = engine.write(*commits)
        assert answers.commits == (JobAnswer.OK, JobAnswer.FENCED, JobAnswer.OK)
        assert answers.commit == before + 2 == store.identity().commit

    def test_a_job_cannot_finish_as_running_or_fail_without_a_reason(self, store: JobStore, engine: EngineUnderTest):
        submit(store)
        engine.claim()
        for finish in (Finish(JobStatus.QUEUED), Finish(JobStatus.FAILED)):
            with pytest.raises(ValueError):
                engine.commit("job-1", finish=finish)


class TestPages:
    def test_published_and_dropped(self, store: JobStore, engine: EngineUnderTest):
        entries = {3: PageEntry("ab" * 16, 2**64 - 1), 0: PageEntry("cd" * 16, 0)}
        engine.write(publish=entries)
        assert store.pool_table("pool-engine-1") == entries
        engine.write(drop=(3, 77))
        engine.write(drop=(3, 77))
        assert store.pool_table("pool-engine-1") == {0: entries[0]}

    def test_drop_goes_before_publish_in_one_step(self, store: JobStore, engine: EngineUnderTest):
        engine.write(publish={3: PageEntry("a", 1)})
        engine.write(drop=(3,), publish={3: PageEntry("b", 2)})
        assert store.pool_table("pool-engine-1") == {3: PageEntry("b", 2)}

    def test_only_the_registered_incarnation_writes_its_own_pool(self, store: JobStore, engine: EngineUnderTest):
        writes = StepWrites(publish={1: PageEntry("a", 1)})
        for incarnation, pool in (("inc-0", "pool-engine-1"), ("inc-1", "pool-engine-2")):
            with pytest.raises(EngineDead):
                store.write_step("engine-1", incarnation, pool, writes)
        assert store.pool_table("pool-engine-1") == store.pool_table("pool-engine-2") == {}

    def test_the_table_outlives_its_jobs_and_a_new_life_but_not_its_file(self, store: JobStore, engine: EngineUnderTest):
        engine.write(publish={1: PageEntry("a", 1)})
        engine.register("inc-2")
        assert store.pool_table("pool-engine-1") == {1: PageEntry("a", 1)}
        engine.info = replace(engine.info, pool_id="pool-new")
        engine.register("inc-3")
        assert store.pool_table("pool-engine-1") == {}


class TestRegister:
    def test_reowns_at_once_with_a_higher_fence(self, store: JobStore, engine: EngineUnderTest):
        for job_id in "ab":
            submit(store, job_id)
        engine.claim()
        engine.commit("a", 1)
        answer = engine.register("inc-2")
        assert answer.owned == (OwnedJob("a", 2, 0), OwnedJob("b", 2, 1))
        assert engine.register("inc-2") == answer
        assert [store.get(job_id).recoveries for job_id in "ab"] == [1, 1]
        assert engine.renew().owned == answer.owned
        assert status_of(store, "a") is JobStatus.IN_PROGRESS

    def test_an_old_life_is_refused_everything(self, store: JobStore, engine: EngineUnderTest):
        submit(store)
        (job,) = engine.claim()
        late = commit_of(store.get("job-1"), 5)
        engine.register("inc-2")
        engine.incarnation = "inc-1"
        for attempt in (lambda: engine.write(late), engine.renew, engine.claim, lambda: engine.release(job)):
            with pytest.raises(EngineDead):
                attempt()
        assert store.get("job-1").log_length == 0

    def test_another_boot_must_wait_and_a_living_copy_is_found(self, store: JobStore, engine: EngineUnderTest):
        submit(store)
        engine.claim()
        copy = EngineUnderTest(store, "engine-1", "inc-copy", boot_id="boot-2", host="host-2")
        answer = copy.register()
        assert answer.outcome is RegisterOutcome.OTHER_HOST
        assert answer.holder == store.engines()[0]
        assert (answer.holder.info.host, answer.holder.job_ids) == ("host-1", ("job-1",))
        seen = (answer.holder.incarnation, answer.holder.beat)
        engine.renew()
        moved = copy.register(seen=seen)
        assert (moved.outcome, moved.holder.info.host) == (RegisterOutcome.IN_USE, "host-1")
        again = (moved.holder.incarnation, moved.holder.beat)
        assert copy.register(seen=again).owned == (OwnedJob("job-1", 2, 1),)

    def test_another_boot_need_not_wait_for_one_that_was_declared_dead(self, store: JobStore, engine: EngineUnderTest):
        store.take_over("engine-1", "inc-1", 1)
        moved = EngineUnderTest(store, "engine-1", "inc-2", boot_id="boot-2")
        assert moved.register().outcome is RegisterOutcome.REGISTERED

    def test_another_model_is_refused_while_jobs_are_listed(self, store: JobStore, engine: EngineUnderTest):
        submit(store)
        (job,) = engine.claim()
        other = EngineUnderTest(store, "engine-1", "inc-2", model_fingerprint="model-b")
        refused = other.register()
        assert (refused.outcome, refused.holder.info.model_fingerprint) == (RegisterOutcome.OTHER_MODEL, "model-a")
        engine.release(job)
        assert other.register().outcome is RegisterOutcome.REGISTERED

    def test_a_dead_incarnation_cannot_register_again(self, store: JobStore, engine: EngineUnderTest):
        store.take_over("engine-1", "inc-1", 1)
        with pytest.raises(EngineDead):
            engine.register("inc-1")
        assert engine.register("inc-2").outcome is RegisterOutcome.REGISTERED


class TestTakeOver:
    def test_only_the_pair_that_was_judged(self, store: JobStore, engine: EngineUnderTest):
        submit(store)
        engine.claim()
        engine.renew()
        assert store.take_over("engine-1", "inc-1", 1) == 0
        assert store.take_over("engine-1", "inc-0", 2) == 0
        assert store.take_over("nobody", "inc-1", 1) == 0
        assert not store.engines()[0].dead
        assert store.take_over("engine-1", "inc-1", 2) == 1
        assert store.take_over("engine-1", "inc-1", 2) == 0
        assert store.engines()[0].dead

    def test_dead_means_refused_everything_though_jobs_are_still_listed(self, store: JobStore, engine: EngineUnderTest):
        for i in range(70):
            submit(store, f"job-{i}")
        held: tuple[str, ...] = ()
        for got in (32, 32, 6):  # a claim considers 32
            held += tuple(job.job_id for job in engine.claim(held=held))
            assert len(held) % 32 == got % 32
        assert store.take_over("engine-1", "inc-1", 1) == 64
        late = commit_of(store.get("job-69"), 5)
        for attempt in (lambda: engine.write(late), engine.renew, engine.claim):
            with pytest.raises(EngineDead):
                attempt()
        assert (store.take_over("engine-1", "inc-1", 1), store.take_over("engine-1", "inc-1", 1)) == (6, 0)

    def test_the_next_owner_recovers_and_the_old_one_is_fenced(self, store: JobStore, engine: EngineUnderTest):
        submit(store)
        engine.claim()
        engine.commit("job-1", 5)
        late = commit_of(store.get("job-1"), 6)
        store.take_over("engine-1", "inc-1", 1)
        other = EngineUnderTest(store, "engine-2", "inc-x")
        other.register()
        assert other.claim() == (OwnedJob("job-1", 2, 1),)
        assert store.get("job-1").recoveries == 1
        engine.register("inc-2")
        assert engine.write(late).commits == (JobAnswer.FENCED,)
        assert other.write(late).commits == (JobAnswer.FENCED,)
        assert other.commit("job-1", 6) is JobAnswer.OK


class TestStrikes:
    def test_three_blamed_deaths_without_progress_are_poison(self, store: JobStore, engine: EngineUnderTest):
        submit(store)
        assert engine.claim()[0].strikes == 1
        assert engine.register("inc-2", blame=True).owned[0].strikes == 2
        assert engine.register("inc-3", blame=True).owned[0].strikes == 3
        answer = engine.register("inc-4", blame=True)
        assert (answer.owned, answer.failed) == ((), ("job-1",))
        assert engine.register("inc-4", blame=True) == answer
        record = store.get("job-1")
        assert (record.status, record.error.code) == (JobStatus.FAILED, "poison")
        assert "three times" in record.error.message
        assert "alone" in record.error.message

    def test_progress_clears_them(self, store: JobStore, engine: EngineUnderTest):
        submit(store)
        engine.claim()
        for life in range(2, 12):
            engine.commit("job-1", life)
            assert engine.register(f"inc-{life}", blame=True).owned[0].strikes == 1
        assert store.get("job-1").recoveries == 10

    def test_a_deliberate_kill_adds_none_and_never_fails(self, store: JobStore, engine: EngineUnderTest):
        submit(store)
        engine.claim()
        engine.register("inc-2", blame=True)
        engine.register("inc-3", blame=True)
        for life in range(4, 9):
            assert engine.register(f"inc-{life}", blame=False).owned == (OwnedJob("job-1", life, 3),)

    def test_release_takes_its_own_back(self, store: JobStore, engine: EngineUnderTest):
        submit(store)
        engine.claim()
        for _ in range(5):
            engine.release(*engine.claim())
            assert store.get("job-1").strikes == 0
            engine.claim()
        (job,) = engine.register("inc-2", blame=True).owned
        assert job.strikes == 2
        engine.release(job)
        assert store.get("job-1").strikes == 1

    def test_a_lost_machine_is_no_crash_of_the_job(self, store: JobStore, engine: EngineUnderTest):
        submit(store)
        for life in range(2, 8):
            assert engine.claim()[0].strikes == 1
            store.take_over("engine-1", engine.incarnation, 1)
            assert store.get("job-1").strikes == 0
            engine.register(f"inc-{life}")

    def test_counters_are_no_progress(self, store: JobStore, engine: EngineUnderTest):
        submit(store)
        engine.claim()
        engine.commit("job-1", tokens_replayed=5)
        assert store.get("job-1").strikes == 1


class TestEnding:
    def test_cancel_is_terminal_at_once_in_any_state(self, store: JobStore, engine: EngineUnderTest):
        submit(store, "queued")
        assert store.cancel("queued").status is JobStatus.CANCELLED
        submit(store, "running")
        engine.claim()
        engine.commit("running", 5)
        late = commit_of(store.get("running"), 6)
        record = store.cancel("running")
        assert (record.status, record.log_length) == (JobStatus.CANCELLED, 1)
        assert store.cancel("running") == record
        assert engine.write(late).commits == (JobAnswer.TERMINAL,)
        assert engine.renew().owned == engine.claim() == ()
        assert store.cancel("nobody") is None

    def test_fail_whatever_the_owner(self, store: JobStore, engine: EngineUnderTest):
        submit(store)
        engine.claim()
        record = store.fail("job-1", "chain_broken", "the log does not verify")
        assert record.error == JobError("chain_broken", "the log does not verify")
        assert store.fail("job-1", "other", "x") == record
        assert store.fail("nobody", "x", "y") is None

    def test_deadlines(self, backend: Backend, store: JobStore, engine: EngineUnderTest):
        submit(store, "a", deadline_seconds=60)
        submit(store, "b", deadline_seconds=50)
        submit(store, "c", deadline_seconds=500)
        engine.claim(limit=1)
        submit(store, "done", deadline_seconds=1)
        store.cancel("done")
        assert store.sweep_deadlines() == ()
        backend.advance(100)
        assert store.sweep_deadlines() == ("b", "a")
        assert store.sweep_deadlines() == ()
        assert store.get("a").error.code == "deadline_exceeded"
        assert engine.renew().owned == ()

    def test_counts_follow(self, store: JobStore, engine: EngineUnderTest):
        for job_id in "abcd":
            submit(store, job_id)
        engine.claim(limit=2)
        engine.commit("a", 1, finish=Finish(JobStatus.INCOMPLETE, "length"))
        store.cancel("c")
        expected = {JobStatus.QUEUED: 1, JobStatus.IN_PROGRESS: 1, JobStatus.INCOMPLETE: 1, JobStatus.CANCELLED: 1}
        assert store.counts() == dict.fromkeys(JobStatus, 0) | expected


class TestRetention:
    def test_purges_whole_jobs_that_ended_long_ago(self, backend: Backend, store: JobStore):
        submit(store, "old")
        store.cancel("old")
        backend.advance(100)
        submit(store, "young")
        store.cancel("young")
        submit(store, "alive")
        assert store.sweep_expired(50) == 1
        assert store.get("old") is None
        assert store.read([LogRead("old")]) == [None]
        assert {job.job_id for job in store.jobs().jobs} == {"young", "alive"}
        assert store.sweep_expired(50) == 0
        submit(store, "old")

    def test_spares_what_somebody_read_lately(self, backend: Backend, store: JobStore):
        submit(store)
        store.cancel("job-1")
        backend.advance(1000)
        store.read([LogRead("job-1")])
        assert store.sweep_expired(50) == 0
        backend.advance(365)
        assert store.sweep_expired(50) == 1

    def test_an_idempotency_key_lives_a_day_and_as_long_as_its_job(self, backend: Backend, store: JobStore):
        submit(store, idempotency_key="k")
        store.cancel("job-1")
        backend.advance(3600)
        assert store.sweep_expired(50) == 0
        assert store.submit(new_job("job-2", idempotency_key="k"), queue_limit=9).outcome is SubmitOutcome.EXISTS
        backend.advance(23 * 3600 + 1)
        assert store.sweep_expired(50) == 1
        submit(store, "job-2", idempotency_key="k")

    def test_stops_when_the_clock_seems_to_have_jumped(self, backend: Backend, store: JobStore):
        for i in range(12):
            submit(store, f"job-{i}")
            store.cancel(f"job-{i}")
        backend.advance(100)
        with pytest.raises(StorageError, match="clock step"):
            store.sweep_expired(50, limit=5)
        assert len(store.jobs().jobs) == 12
        assert store.sweep_expired(50, limit=100) == 12


class TestReading:
    def test_pages_newest_first(self, store: JobStore):
        for i in range(7):
            submit(store, f"job-{i}")
        first = store.jobs(limit=3)
        assert [job.job_id for job in first.jobs] == ["job-6", "job-5", "job-4"]
        second = store.jobs(limit=3, cursor=first.next_cursor)
        third = store.jobs(limit=3, cursor=second.next_cursor)
        assert [job.job_id for job in second.jobs + third.jobs] == ["job-3", "job-2", "job-1", "job-0"]
        assert third.next_cursor is None
        assert store.jobs(limit=7).next_cursor is None

    @pytest.mark.parametrize("cursor", ["", "x", "-1", "1.5", "²", "inf"])
    def test_refuses_a_cursor_that_is_not_ours(self, store: JobStore, cursor: str):
        with pytest.raises(StorageError, match="cursor"):
            store.jobs(cursor=cursor)

    def test_filters_by_status_and_tenant(self, store: JobStore):
        for job_id, tenant in (("a", ""), ("b", "t"), ("c", "t")):
            submit(store, job_id, tenant=tenant)
        store.cancel("c")
        assert [job.job_id for job in store.jobs().jobs] == ["a"]
        assert [job.job_id for job in store.jobs(tenant="t").jobs] == ["c", "b"]
        assert [job.job_id for job in store.jobs(tenant="t", status=JobStatus.QUEUED).jobs] == ["b"]
        assert [job.job_id for job in store.jobs(tenant=None).jobs] == ["c", "b", "a"]

    def test_hints_name_what_changed(self, backend: Backend, store: JobStore):
        assert store.wait_hint(0.01) == frozenset()
        submit(store)
        submit(store, "job-2")
        seen: set[str] = set()
        for _ in range(3):
            seen |= store.wait_hint(0.5 if len(seen) < 2 else 0.01)
        assert seen == {"job-1", "job-2"}

    def test_a_waiting_thread_wakes(self, store: JobStore):
        store.wait_hint(0.01)
        timer = threading.Timer(0.1, lambda: submit(store))
        timer.start()
        assert store.wait_hint(10) == {"job-1"}
        timer.join()

    def test_engines_are_listed(self, store: JobStore, engine: EngineUnderTest):
        submit(store)
        engine.claim()
        engine.renew()
        (record,) = store.engines()
        assert record.info == engine_info()
        assert (record.incarnation, record.beat, record.dead, record.job_ids) == ("inc-1", 2, False, ("job-1",))


def test_every_write_sent_twice_leaves_the_same_state(backend: Backend):
    """The reply is lost, the same call goes again: nothing may differ but beat and commit counters."""
    snapshots = []
    for copies in (1, 2):
        if backend.name != "memory":
            backend.raw.flushall()
            store = bound(backend)
        else:
            backend = type(backend)()
            store = bound(backend)
        engine = EngineUnderTest(store)

        def again(call, copies=copies):
            answers = [call() for _ in range(copies)]
            return answers[0]

        again(lambda store=store: store.submit(new_job(idempotency_key="k"), queue_limit=1))
        again(lambda store=store: store.submit(new_job("job-2"), queue_limit=2))
        again(lambda store=store: store.submit(new_job("job-3"), queue_limit=3))
        again(lambda engine=engine: engine.register("inc-1"))
        first, second, third = again(lambda engine=engine: engine.claim())
        step = (commit_of(store.get("job-1"), 1, 2, tokens_replayed=1), commit_of(store.get("job-2"), pages_restored=1))
        again(lambda engine=engine, step=step: engine.write(*step, publish={1: PageEntry("a", 1)}, drop=(2,)))
        again(lambda engine=engine: engine.register("inc-2", blame=True))
        last = commit_of(store.get("job-1"), 3, finish=Finish(JobStatus.COMPLETED, "stop"))
        again(lambda engine=engine, last=last: engine.write(last))
        third = replace(third, fence=store.get("job-3").fence)
        again(lambda engine=engine, third=third: engine.release(third, affinity=True))
        again(lambda store=store: store.take_over("engine-1", "inc-2", 1))
        again(lambda engine=engine: engine.register("inc-3"))
        again(lambda store=store: store.cancel("job-2"))
        again(lambda store=store: store.fail("job-3", "x", "y"))
        snapshots.append([_timeless(store.get(f"job-{i}")) for i in (1, 2, 3)] + [store.pool_table("pool-engine-1"), store.counts()])
        assert store.read([LogRead("job-1")])[0].entries == tokens(1, 2, 3)
    assert snapshots[0] == snapshots[1]


def _timeless(record):
    return replace(record, created_at=0, started_at=None, finished_at=None)
