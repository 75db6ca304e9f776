"""What both job stores promise to engines (storage/job_store.py, PROTOCOL.md 2, 3, 4)."""

import threading
from dataclasses import replace

import pytest

from storage.errors import EngineDead
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
)
from tests.storage.backends import (
    Backend,
    EngineUnderTest,
    bound,
    commit_of,
    new_job,
    status_of,
    submit,
    tokens,
)


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
        assert engine.release(first) == (JobAnswer.ALREADY,)
        assert [job.job_id for job in engine.claim()] == ["a", "b", "c"]

    def test_only_jobs_of_the_engines_model(self, store: JobStore, engine: EngineUnderTest):
        submit(store, "other", model_fingerprint="model-b")
        assert engine.claim() == ()

    def test_what_fits_overtakes_what_does_not_for_thirty_seconds(self, backend: Backend, store: JobStore, engine: EngineUnderTest):
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
        large, _ = engine.claim(held=held, free_pages=14)
        assert (large.job_id, status_of(store, "small-3")) == ("large", JobStatus.IN_PROGRESS)
        engine.release(large)
        submit(store, "small-4")
        assert [job.job_id for job in engine.claim(held=(*held, "small-3"), free_pages=10)] == ["small-4"]  # 30 s anew

    def test_a_large_job_does_not_wait_for_a_clock_that_was_put_back(
        self, backend: Backend, store: JobStore, engine: EngineUnderTest
    ):
        submit(store, "large", prompt_token_ids=tuple(range(160)))
        submit(store, "small-1")
        assert [job.job_id for job in engine.claim(free_pages=10, limit=1)] == ["small-1"]
        submit(store, "small-2")
        backend.advance(-3600)
        assert engine.claim(held=("small-1",), free_pages=10) == ()

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

    @pytest.mark.parametrize("step", [-86_400, 86_400])
    def test_affinity_ends_when_the_clock_is_set(self, backend: Backend, store: JobStore, engine: EngineUnderTest, step: int):
        """A clock that had been a day ahead was put right: an engine that had gone for good kept its jobs for a day."""
        other = EngineUnderTest(store, "engine-2", "inc-x")
        other.register()
        submit(store)
        engine.release(*engine.claim(), affinity=True)
        backend.advance(step)
        assert len(other.claim()) == 1

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

    def test_the_fence_alone_is_no_proof(self, store: JobStore, engine: EngineUnderTest):
        """After Redis lost its tail, a fence number can come twice; an incarnation cannot."""
        submit(store)
        engine.claim()
        other = EngineUnderTest(store, "engine-2", "inc-x")
        other.register()
        assert other.commit("job-1", 5) is JobAnswer.FENCED

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
        only = commit_of(store.get("job-1"), cached_tokens=16, tokens_replayed=3, pages_restored=2, arithmetic_fingerprint="cpu-1")
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

    def test_an_entry_is_as_old_as_its_publication_whatever_begins_anew(
        self, backend: Backend, store: JobStore, engine: EngineUnderTest
    ):
        engine.write(publish={1: PageEntry("a", 1), 2: PageEntry("b", 2)})
        backend.advance(1000)
        engine.register("inc-2")
        engine.write(publish={2: PageEntry("c", 3)})
        ages = {page: entry.age for page, entry in store.pool_table("pool-engine-1").items()}
        assert ages == {1: pytest.approx(1000, abs=30), 2: pytest.approx(0, abs=30)}

    def test_a_life_without_a_pool_has_no_table_and_takes_the_old_one_away(self, store: JobStore, engine: EngineUnderTest):
        engine.write(publish={1: PageEntry("a", 1)})
        with_pool = engine.info
        engine.info = replace(with_pool, pool_id="")
        engine.register("inc-2")
        submit(store)
        engine.claim()
        assert engine.commit("job-1", 5)
        assert store.pool_table("") == store.pool_table("pool-engine-1") == {}
        assert next(e for e in store.engines() if e.info.engine_id == "engine-1").info.pool_id == ""
        engine.info = with_pool
        engine.register("inc-3")
        assert store.pool_table("pool-engine-1") == {}
        engine.write(publish={2: PageEntry("b", 2)})
        assert store.pool_table("pool-engine-1") == {2: PageEntry("b", 2)}


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
        other.release(OwnedJob("job-1", 2, 0))
        other.claim()
        assert store.get("job-1").recoveries == 1  # a release is no loss


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

    def test_of_several_suspects_the_first_is_to_blame(self, store: JobStore, engine: EngineUnderTest):
        """They run alone, one after the other: the others had no turn yet."""
        for name in ("job-1", "job-2", "job-3"):
            submit(store, name)
        engine.claim()
        engine.register("inc-2", blame=True)
        engine.register("inc-3", blame=True)
        answer = engine.register("inc-4", blame=True)
        assert answer.failed == ("job-1",)
        assert [job.job_id for job in answer.owned] == ["job-2", "job-3"]
        engine.commit("job-2", 4)
        answer = engine.register("inc-5", blame=True)
        assert answer.failed == ("job-3",)
        assert [(job.job_id, job.strikes) for job in answer.owned] == [("job-2", 1)]

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

    def test_an_engine_that_comes_back_and_did_not_crash_takes_the_strike_off(self, store: JobStore, engine: EngineUnderTest):
        """Deploys, reboots, pauses longer than the lease: as many as there are."""
        submit(store)
        for life in range(2, 8):
            assert engine.claim()[0].strikes == 1
            store.take_over("engine-1", engine.incarnation, 1)
            assert store.get("job-1").strikes == 1
            engine.register(f"inc-{life}")
        assert engine.claim()[0].strikes == 1

    def test_a_crash_that_was_first_taken_for_silence_counts(self, store: JobStore, engine: EngineUnderTest):
        """The engine started again more slowly than its lease: a poison job was handed on for ever, and everything with it."""
        submit(store)
        for life in range(1, 4):
            assert engine.claim()[0].strikes == life
            store.take_over("engine-1", engine.incarnation, 1)
            assert engine.register(f"inc-{life + 1}", blame=True).owned == ()
        assert engine.claim() == ()
        assert store.get("job-1").error.code == "poison"

    def test_engines_that_never_come_back_count(self, store: JobStore):
        """A poison that takes the whole machine: each time another engine gets it."""
        submit(store)
        for life in range(1, 4):
            one = EngineUnderTest(store, f"engine-{life}")
            one.register()
            assert one.claim()[0].strikes == life
            store.take_over(f"engine-{life}", one.incarnation, 1)
        last = EngineUnderTest(store, "engine-4")
        last.register()
        assert last.claim() == ()
        assert store.get("job-1").error.code == "poison"

    def test_who_holds_a_suspect_is_given_nothing_new(self, store: JobStore, engine: EngineUnderTest, backend: Backend):
        """Found by the chaos scenario poison_abort: an earlier suspect that came while the poison had its turn was blamed for it.

        The earlier one, job-1, did not fit at first; the engine died of job-2 when job-1 had just been given to it.
        """
        for name in ("job-1", "job-2"):
            submit(store, name)
        engine.claim()
        first, _ = engine.register("inc-2", blame=True).owned  # both are suspects
        engine.release(first)
        assert engine.claim(held=("job-2",)) == ()
        assert [job.job_id for job in engine.claim()] == ["job-2"]  # whose answer may have been lost
        engine.commit("job-2", 7)
        assert [job.job_id for job in engine.claim(held=("job-2",))] == ["job-1"]

    def test_of_suspects_that_are_taken_over_the_first_is_to_blame(self, store: JobStore, engine: EngineUnderTest):
        for name in ("job-1", "job-2", "job-3"):
            submit(store, name)
        engine.claim()
        engine.register("inc-2", blame=True)
        engine.commit("job-1", 4)
        store.take_over("engine-1", "inc-2", 1)
        assert [store.get(name).strikes for name in ("job-1", "job-2", "job-3")] == [0, 2, 1]

    def test_progress_of_the_next_owner_clears_what_the_last_one_left(self, store: JobStore, engine: EngineUnderTest):
        submit(store)
        engine.claim()
        store.take_over("engine-1", engine.incarnation, 1)
        engine.register("inc-2", blame=True)
        engine.claim()
        engine.commit("job-1", 4)
        assert store.get("job-1").strikes == 0

    def test_counters_are_no_progress(self, store: JobStore, engine: EngineUnderTest):
        submit(store)
        engine.claim()
        engine.commit("job-1", tokens_replayed=5)
        assert store.get("job-1").strikes == 1

    def test_pages_are_no_progress(self, store: JobStore, engine: EngineUnderTest):
        """A prompt that crashes at its second page publishes the first in every life, and is poison all the same."""
        submit(store)
        assert engine.claim()[0].strikes == 1
        for life in (2, 3):
            engine.write(publish={life: PageEntry("a page of its prompt", 7)})
            assert engine.register(f"inc-{life}", blame=True).owned[0].strikes == life
        engine.write(publish={4: PageEntry("a page of its prompt", 7)})
        assert engine.register("inc-4", blame=True).failed == ("job-1",)


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
        third = again(lambda engine=engine: engine.claim())[2]
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
        again(lambda store=store: store.submit(new_job("job-4"), new_job("job-5"), queue_limit=2))
        records = [_timeless(store.get(f"job-{i}")) for i in (1, 2, 3, 4, 5)]
        snapshots.append((records, store.pool_table("pool-engine-1"), store.counts()))
        assert store.read([LogRead("job-1")])[0].entries == tokens(1, 2, 3)
    assert snapshots[0] == snapshots[1]


def _timeless(record):
    return replace(record, created_at=0, started_at=None, finished_at=None)
