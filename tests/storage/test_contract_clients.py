"""What both job stores promise to clients and operators (storage/job_store.py, PROTOCOL.md 5, 7, 9)."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
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
    LogRead,
    NewJob,
    StoreIdentity,
    SubmitOutcome,
)
from tests.storage.backends import (
    LIMIT,
    Backend,
    EngineUnderTest,
    commit_of,
    engine_info,
    new_job,
    submit,
)


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
        assert (same.outcome, same.job_ids) == (SubmitOutcome.EXISTS, ("job-1",))
        other = store.submit(new_job("job-3", idempotency_key="k", request_hash="other"), queue_limit=LIMIT)
        assert (other.outcome, other.job_ids) == (SubmitOutcome.CONFLICT, ("job-1",))
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


def group(*job_ids: str, **values) -> list[NewJob]:
    return [new_job(job_id, spec=f'{{"n":{i}}}', group=job_ids[0], **values) for i, job_id in enumerate(job_ids)]


class TestGroups:
    def test_all_of_a_group_are_made_by_one_commit(self, store: JobStore, engine: EngineUnderTest):
        jobs = group("a", "b", "c", deadline_seconds=5)
        before = store.identity().commit
        answer = store.submit(*jobs, queue_limit=3)
        assert (answer.outcome, answer.job_ids) == (SubmitOutcome.CREATED, ("a", "b", "c"))
        assert store.identity().commit == before + 1
        records = [store.get(job.job_id) for job in jobs]
        assert [(r.spec, r.group, r.order) for r in records] == [(job.spec, "a", i + 1) for i, job in enumerate(jobs)]
        assert [r.chain for r in records] == [chain.start(job.spec, job.prompt_token_ids, job.job_id) for job in jobs]
        assert len({(r.created_at, r.deadline_at, r.prompt_token_ids) for r in records}) == 1
        assert store.counts()[JobStatus.QUEUED] == store.queued("model-a") == 3
        assert [job.job_id for job in engine.claim()] == ["a", "b", "c"]

    def test_the_jobs_of_a_group_may_have_prompts_of_their_own(self, store: JobStore, engine: EngineUnderTest):
        prompts = [(1, 2, 3), (), (1, 2, 3), (9,)]
        jobs = [replace(job, prompt_token_ids=tokens) for job, tokens in zip(group(*"abcd"), prompts, strict=True)]
        assert store.submit(*jobs, queue_limit=4).outcome is SubmitOutcome.CREATED
        records = [store.get(job.job_id) for job in jobs]
        assert [record.prompt_token_ids for record in records] == prompts
        assert [record.chain for record in records] == [chain.start(job.spec, job.prompt_token_ids, job.job_id) for job in jobs]
        assert len(engine.claim()) == 4
        assert engine.commit("d", 7, finish=Finish(JobStatus.COMPLETED, "stop")) is JobAnswer.OK

    def test_each_job_needs_the_pages_of_its_own_prompt(self, store: JobStore, engine: EngineUnderTest):
        small, large = group("small", "large")
        store.submit(small, replace(large, prompt_token_ids=tuple(range(640))), queue_limit=2)
        assert [job.job_id for job in engine.claim(free_pages=10)] == ["small"]

    def test_the_queue_limit_counts_all_and_a_refused_group_leaves_nothing(self, store: JobStore):
        submit(store)
        refused = store.submit(*group("a", "b", idempotency_key="k"), queue_limit=2)
        assert (refused.outcome, refused.job_ids) == (SubmitOutcome.FULL, ("a", "b"))
        assert store.get("a") is store.get("b") is None
        assert store.queued("model-a") == 1
        assert store.submit(*group("a", "b", idempotency_key="k"), queue_limit=3).outcome is SubmitOutcome.CREATED

    def test_the_limit_of_a_tenant_counts_its_queued_jobs_of_all_models(self, store: JobStore):
        submit(store, "of-another-model", tenant="t", model_fingerprint="model-b")
        submit(store, "of-nobody")
        refused = store.submit(*group("a", "b", tenant="t"), queue_limit=LIMIT, tenant_limit=2)
        assert (refused.outcome, refused.job_ids) == (SubmitOutcome.TENANT_FULL, ("a", "b"))
        assert store.get("a") is None
        assert store.submit(*group("a", "b", tenant="t"), queue_limit=LIMIT, tenant_limit=3).outcome is SubmitOutcome.CREATED
        assert store.submit(new_job("c", tenant="u"), queue_limit=LIMIT, tenant_limit=1).outcome is SubmitOutcome.CREATED
        store.cancel("a")  # what waits no longer does not count
        assert store.submit(new_job("d", tenant="t"), queue_limit=LIMIT, tenant_limit=3).outcome is SubmitOutcome.CREATED

    def test_a_retry_finds_the_group(self, store: JobStore):
        store.submit(*group("a", "b", idempotency_key="k"), queue_limit=2)
        own = store.submit(*group("a", "b", idempotency_key="k"), queue_limit=0)
        same = store.submit(*group("c", "d", idempotency_key="k"), queue_limit=0)
        assert own == same
        assert (same.outcome, same.job_ids) == (SubmitOutcome.EXISTS, ("a", "b"))
        other = store.submit(*group("c", "d", idempotency_key="k", request_hash="other"), queue_limit=LIMIT)
        assert (other.outcome, other.job_ids) == (SubmitOutcome.CONFLICT, ("a", "b"))
        assert store.submit(*group("e", "b"), queue_limit=LIMIT).outcome is SubmitOutcome.EXISTS
        assert len(store.jobs().jobs) == 2

    def test_jobs_are_purged_one_by_one_and_the_key_goes_with_the_first(self, backend: Backend, store: JobStore):
        def with_key(*job_ids: str) -> tuple[str, ...]:
            return store.submit(*group(*job_ids, idempotency_key="k"), queue_limit=LIMIT).job_ids

        with_key("a", "b", "c")
        store.cancel("b")
        backend.advance(3600)
        assert store.sweep_expired(50) == 0  # the key finds b, too, for a day at least
        store.cancel("a")
        backend.advance(24 * 3600)
        assert store.sweep_expired(50) == 2
        assert store.get("c").status is JobStatus.QUEUED
        assert with_key("x", "y") == ("x", "y")
        store.cancel("c")
        backend.advance(100)
        assert store.sweep_expired(50) == 1
        assert with_key("z") == ("x", "y")  # c no longer had a say in it
        assert backend.leftovers() == []

    def test_jobs_that_differ_in_more_than_id_spec_and_prompt_are_no_group(self, store: JobStore):
        for jobs in ([], group("a", "a"), [new_job("a"), new_job("b", model_fingerprint="model-b")]):
            with pytest.raises(ValueError, match="group"):
                store.submit(*jobs, queue_limit=LIMIT)


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


class TestDeleting:
    def test_whole_and_at_once_whatever_its_state(self, backend: Backend, store: JobStore, engine: EngineUnderTest):
        submit(store, "queued", idempotency_key="k")
        assert store.delete("queued", "nobody") == 1
        assert store.delete("queued") == 0
        submit(store, "running", deadline_seconds=60, idempotency_key="k")
        engine.claim()
        engine.commit("running", 5)
        late = commit_of(store.get("running"), 6)
        assert store.delete("running") == 1
        assert store.get("running") is None
        assert engine.write(late).commits == (JobAnswer.GONE,)
        assert engine.renew().owned == engine.claim() == ()
        backend.advance(100)
        assert store.sweep_deadlines() == ()
        assert backend.leftovers() == []
        assert store.counts() == dict.fromkeys(JobStatus, 0)

    def test_a_group_goes_with_its_key(self, backend: Backend, store: JobStore):
        jobs = group("a", "b", idempotency_key="k")
        store.submit(*jobs, queue_limit=LIMIT)
        assert store.delete("a", "b") == 2
        assert backend.leftovers() == []
        assert store.submit(*jobs, queue_limit=LIMIT).outcome is SubmitOutcome.CREATED


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
        assert backend.leftovers() == []
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

    def test_who_does_not_want_tokens_is_woken_by_states(self, backend: Backend, store: JobStore, engine: EngineUnderTest):
        def other() -> frozenset[str]:
            return store.wait_hint(0.3, tokens=False)

        with ThreadPoolExecutor(1) as thread:  # a subscription belongs to its thread
            thread.submit(store.wait_hint, 0.01, tokens=False).result()
            submit(store)
            engine.register()
            engine.claim()
            assert thread.submit(other).result() == {"job-1"}
            while thread.submit(other).result():  # that of the claim may come a moment after its reply
                pass
            engine.write(commit_of(store.get("job-1"), 1, 2))
            if backend.name != "memory":  # the fake may say too much: it is a hint
                assert thread.submit(other).result() == frozenset()
            store.cancel("job-1")
            assert thread.submit(other).result() == {"job-1"}

    def test_a_waiting_thread_wakes(self, store: JobStore):
        store.wait_hint(0.01)
        timer = threading.Timer(0.1, lambda: submit(store))
        timer.start()
        assert store.wait_hint(10) == {"job-1"}
        timer.join()

    def test_vitals_reach_those_who_listen_and_are_kept_nowhere(self, store: JobStore):
        assert store.publish_vitals("told to nobody") == 0
        feeds = [store.vitals(), store.vitals()]
        assert [feed.wait(0.01) for feed in feeds] == [[], []]
        mark = store.identity()
        assert [store.publish_vitals(text) for text in ("one", "", "two")] == [2, 2, 2]  # an empty one only counts
        for feed in feeds:
            told: list[str] = []
            while len(told) < 2:
                told += feed.wait(20)
            assert told == ["one", "two"]
            feed.close()
        deadline = time.monotonic() + 5
        while store.publish_vitals("") and time.monotonic() < deadline:
            pass
        assert store.publish_vitals("") == 0
        assert store.identity() == mark

    def test_engines_are_listed(self, store: JobStore, engine: EngineUnderTest):
        submit(store)
        engine.claim()
        engine.renew()
        (record,) = store.engines()
        assert record.info == engine_info()
        assert (record.incarnation, record.beat, record.dead, record.job_ids) == ("inc-1", 2, False, ("job-1",))


class TestApis:
    """Jobs that end with the api that serves them (PROTOCOL.md 3)."""

    def test_an_api_is_listed_while_its_jobs_live(self, store: JobStore, engine: EngineUnderTest):
        submit(store, "of-nobody")
        assert store.apis() == []
        submit(store, "a", served_by="api-1")
        store.submit(*group("b", "c", served_by="api-1"), queue_limit=LIMIT)
        submit(store, "d", served_by="api-2")
        assert [(api.incarnation, api.job_ids) for api in store.apis()] == [("api-1", ("a", "b", "c")), ("api-2", ("d",))]
        engine.claim()
        engine.commit("a", 1, finish=Finish(JobStatus.COMPLETED, "stop"))
        store.cancel("b")
        store.delete("d")
        assert [(api.incarnation, api.job_ids) for api in store.apis()] == [("api-1", ("c",))]
        store.fail("c", "code", "message")
        assert store.apis() == []

    def test_a_job_is_its_apis_in_the_queue_and_at_every_engine(self, store: JobStore, engine: EngineUnderTest):
        submit(store, "a", served_by="api-1")
        engine.release(*engine.claim())
        engine.claim()
        (seen,) = store.engines()
        assert store.take_over("engine-1", seen.incarnation, seen.beat) == 1
        assert [api.job_ids for api in store.apis()] == [("a",)]

    def test_no_beat_comes_twice(self, store: JobStore):
        """Else an api that is listed anew between two looks would seem to have stood still since it was listed before."""
        beats = []
        for job_id in ("a", "b", "c"):
            submit(store, job_id, served_by="api-1")
            store.beat("api-1")
            beats.append(store.apis()[0].beat)
            store.cancel(job_id)
        assert sorted(set(beats)) == beats

    def test_a_beat_is_no_commit_and_that_of_an_idle_api_nothing(self, store: JobStore):
        submit(store, "a", served_by="api-1")
        submit(store, "b", served_by="api-2")
        before, commit = store.apis(), store.identity().commit
        store.beat("api-1")
        store.beat("api-3")
        after = store.apis()
        assert [api.incarnation for api in after] == ["api-1", "api-2"]
        assert [ours.beat > theirs.beat for ours, theirs in zip(after, before, strict=True)] == [True, False]
        assert store.identity().commit == commit

    def test_the_retry_of_a_submit_lists_nothing_that_has_ended(self, store: JobStore):
        submit(store, "a", served_by="api-1")
        store.cancel("a")
        assert store.submit(new_job("a", served_by="api-1"), queue_limit=LIMIT).outcome is SubmitOutcome.EXISTS
        assert store.apis() == []


class TestStored:
    def test_stored_jobs_are_listed_for_as_long_as_they_are_there(self, store: JobStore, backend: Backend):
        for i in range(3):
            submit(store, f"kept-{i}", stored=True, tenant="t")
            submit(store, f"other-{i}", tenant="t")
        submit(store, "elsewhere", stored=True)
        page = store.jobs(stored=True, tenant="t", limit=2)
        assert [record.job_id for record in page.jobs] == ["kept-2", "kept-1"]
        rest = store.jobs(stored=True, tenant="t", limit=2, cursor=page.next_cursor)
        assert ([record.job_id for record in rest.jobs], rest.next_cursor) == (["kept-0"], None)
        first = store.jobs(stored=True, tenant="t", limit=2, oldest_first=True)
        then = store.jobs(stored=True, tenant="t", limit=2, oldest_first=True, cursor=first.next_cursor)
        assert [record.job_id for record in (*first.jobs, *then.jobs)] == ["kept-0", "kept-1", "kept-2"]
        assert then.next_cursor is None
        store.cancel("kept-0")
        store.delete("kept-1")
        assert [record.job_id for record in store.jobs(stored=True, tenant="t").jobs] == ["kept-2", "kept-0"]
        backend.advance(100)
        assert store.sweep_expired(50) == 1
        assert [record.job_id for record in store.jobs(stored=True, tenant="t").jobs] == ["kept-2"]
        assert backend.leftovers() == []

    def test_metadata_may_change_and_the_spec_does_not(self, store: JobStore, engine: EngineUnderTest):
        submit(store)
        before = store.get("job-1")
        assert before.metadata == ""
        commit = store.identity().commit
        described = store.describe("job-1", '{"a":"b"}')
        assert described == store.describe("job-1", '{"a":"b"}') == replace(before, metadata='{"a":"b"}')
        assert store.identity().commit == commit + 1
        assert store.read([LogRead("job-1")])[0].record == described
        engine.claim()
        assert engine.commit("job-1", 1, finish=Finish(JobStatus.COMPLETED, "stop")) is JobAnswer.OK
        assert store.describe("job-1", "{}").metadata == store.read([LogRead("job-1")])[0].record.metadata == "{}"
        assert store.describe("job-9", "{}") is None
