"""The engine loop against the in-memory store: crashes, lost replies, takeovers. Every job ends with the tokens it has alone."""

import gc
import json
import random
import threading
import time
from dataclasses import replace

import pytest
from tokenizers import Tokenizer

from engine.model import load_model
from service.worker import loop
from storage import chain
from storage.errors import EngineDead, StoreUnavailable
from storage.job_spec import JobSpec
from storage.records import JobStatus, LogRead, NewJob
from tests.json_schemas import json_grammar
from tests.lives import Life, life, new_store, submit, wait_until
from tests.rigs import make_rig, request
from tests.storage.backends import EngineUnderTest

LENGTHS = [3, 40, 16, 17, 33]


def requests():
    return [request(f"job-{i}", n, seed=i if i % 2 else None, max_tokens=60 + 10 * i, order=i) for i, n in enumerate(LENGTHS)]


@pytest.fixture(scope="module")
def alone(tiny_folder, tiny_model):
    rig = make_rig(tiny_folder, tiny_model)
    for job in requests():
        rig.add(job)
    return rig.run()


class FlakyStore:
    """Loses calls before they are sent, and replies after they were executed, as a seeded network would."""

    def __init__(self, store, seed, rate=0.25):
        self._store, self._random, self._rate = store, random.Random(seed), rate
        self.lost = 0

    def __getattr__(self, name):
        call = getattr(self._store, name)

        def flaky(*args, **kwargs):
            if self._random.random() < self._rate:
                self.lost += 1
                raise StoreUnavailable("lost before it was sent")
            result = call(*args, **kwargs)
            if self._random.random() < self._rate:
                self.lost += 1
                raise StoreUnavailable("reply lost")
            return result

        return flaky


def ended(store):
    return all(store.get(job.sequence_id).status.terminal for job in requests())


def logs(store):
    result = {}
    for job in requests():
        (piece,) = store.read([LogRead(job.sequence_id)])
        tokens = [entry.token for entry in piece.entries]
        start = chain.start(piece.record.spec, piece.record.prompt_token_ids, job.sequence_id)
        assert chain.extend_all(start, tokens) == piece.record.chain
        result[job.sequence_id] = tokens
    return result


def test_jobs_finish_with_the_tokens_they_have_alone(tiny_folder, tiny_model, alone):
    store = new_store()
    submit(store, requests())
    one = life(tiny_folder, tiny_model, store)
    wait_until(lambda: ended(store))
    one.crash()
    assert logs(store) == alone
    assert {store.get(job.sequence_id).status for job in requests()} == {JobStatus.COMPLETED}
    assert one.observer.deaths == 0  # a beat before registration once declared every new engine dead
    assert one.rig.in_use == one.rig.engine.residency.copies.pages_leaving


def test_garbage_is_collected_whenever_all_jobs_are_done(tiny_folder, tiny_model):
    """Tuples that were freed stay in lists of Python's own until then, so memory grew for thousands of jobs."""
    store = new_store()
    one = life(tiny_folder, tiny_model, store)
    for name in ("first", "second"):
        before = gc.get_stats()[2]["collections"]
        submit(store, [request(name, 5, max_tokens=4)])
        one.wakeups.hint()
        wait_until(lambda name=name: store.get(name).status.terminal)
        wait_until(lambda before=before: gc.get_stats()[2]["collections"] > before)
    one.crash()


@pytest.mark.parametrize("seed", range(4))
def test_lost_calls_and_lost_replies_change_nothing(tiny_folder, tiny_model, alone, seed):
    store = new_store()
    submit(store, requests())
    flaky = FlakyStore(store, seed, rate=0.05)
    one = life(tiny_folder, tiny_model, flaky)
    wait_until(lambda: ended(store))
    one.crash()
    assert flaky.lost > 0
    assert logs(store) == alone
    assert one.observer.drops == []


@pytest.mark.parametrize("seed", range(3))
def test_a_chain_of_crashes(tiny_folder, tiny_model, alone, seed):
    store, rng, before, lives = new_store(), random.Random(seed), None, 0
    submit(store, requests())
    restored = 0
    while not ended(store):
        now = life(tiny_folder, tiny_model, store, before, blame=True)
        lives += 1
        target = sum(store.get(job.sequence_id).log_length for job in requests()) + rng.randrange(
            20, 150
        )  # all get on, else one is poison
        wait_until(lambda: ended(store) or sum(store.get(j.sequence_id).log_length for j in requests()) >= target)  # noqa: B023
        now.crash()
        restored += now.rig.stats.swapped_in
        before = now
    assert lives > 2
    assert restored > 0
    assert logs(store) == alone
    assert max(store.get(job.sequence_id).recoveries for job in requests()) >= 1
    assert max(store.get(job.sequence_id).strikes for job in requests()) == 0


@pytest.mark.parametrize(("weights", "kv_dtype"), [("bf16", "bfloat16"), ("int8", "float16"), ("int8", "float32")])
def test_a_crash_changes_no_token_in_any_number_format(tiny_folder, weights, kv_dtype):
    model = load_model(tiny_folder, weights=weights, kv_dtype=kv_dtype, threads=2)
    rig = make_rig(tiny_folder, model)
    for job in requests():
        rig.add(job)
    expected = rig.run()
    store, before, restored = new_store(), None, 0
    submit(store, requests())
    while not ended(store):
        now = life(tiny_folder, model, store, before)
        target = sum(store.get(job.sequence_id).log_length for job in requests()) + 90
        wait_until(lambda: ended(store) or sum(store.get(j.sequence_id).log_length for j in requests()) >= target)  # noqa: B023
        now.crash()
        restored, before = restored + now.rig.stats.swapped_in, now
    assert restored > 0
    assert logs(store) == expected


def test_a_cancelled_job_is_dropped_and_the_others_go_on(tiny_folder, tiny_model, alone):
    store = new_store()
    submit(store, requests())
    one = life(tiny_folder, tiny_model, store)
    wait_until(lambda: store.get("job-4").log_length > 2)
    store.cancel("job-4")
    wait_until(lambda: ended(store))
    one.crash()
    result = logs(store)
    assert store.get("job-4").status is JobStatus.CANCELLED
    assert result["job-4"] == alone["job-4"][: len(result["job-4"])]
    assert {k: v for k, v in result.items() if k != "job-4"} == {k: v for k, v in alone.items() if k != "job-4"}
    assert one.rig.cache.page_tables == {}


def test_an_engine_declared_dead_starts_over_and_nothing_runs_twice(tiny_folder, tiny_model, alone):
    store = new_store()
    submit(store, requests())
    one = life(tiny_folder, tiny_model, store)
    wait_until(lambda: store.get("job-4").log_length > 2)
    record = next(e for e in store.engines() if e.info.engine_id == "e1")
    while True:  # its beat moves while we look: judge until the pair is the current one
        record = next(e for e in store.engines() if e.info.engine_id == "e1")
        store.take_over("e1", record.incarnation, record.beat)
        if next(e for e in store.engines() if e.info.engine_id == "e1").dead:
            break
    wait_until(lambda: ended(store))
    one.crash()
    assert logs(store) == alone
    assert one.loop.identity.incarnation != record.incarnation
    assert one.observer.deaths == 1


def test_a_beat_of_the_last_life_that_is_answered_late_does_not_end_this_one(tiny_folder, tiny_model):
    """Found by a partition: a commit and a beat on their way were both refused, and the engine started over twice."""
    store = new_store()
    one = life(tiny_folder, tiny_model, store)
    last = one.loop.identity.incarnation

    class Late:
        def renew(self, engine_id, incarnation):
            assert incarnation == last
            while not (record := store.engines()[0]).dead and record.incarnation == last:  # its own beats go on
                store.take_over(engine_id, last, record.beat)
            wait_until(lambda: store.engines()[0].incarnation != last)
            raise EngineDead("the answer to a beat that was sent before")

    one.loop.heartbeat(Late(), 60)
    submit(store, [request("after", 5, max_tokens=4)])
    one.wakeups.hint()
    wait_until(lambda: store.get("after").status.terminal)
    one.crash()
    assert one.observer.deaths == 1


def test_two_engines_share_the_queue(tiny_folder, tiny_model, alone):
    store = new_store()
    one = life(tiny_folder, tiny_model, store)
    two = life(tiny_folder, tiny_model, store, engine_id="e2")
    submit(store, requests())
    one.wakeups.hint()
    two.wakeups.hint()
    wait_until(lambda: ended(store))
    one.crash()
    two.crash()
    assert logs(store) == alone


def test_drain_gives_everything_back_and_the_next_life_goes_on_from_pages(tiny_folder, tiny_model, alone):
    store = new_store()
    submit(store, requests())
    one = life(tiny_folder, tiny_model, store)
    wait_until(lambda: store.get("job-4").log_length > 6)
    one.drain()
    assert {store.get(job.sequence_id).status for job in requests()} <= {JobStatus.QUEUED, JobStatus.COMPLETED}
    two = life(tiny_folder, tiny_model, store, one)
    wait_until(lambda: ended(store))
    two.crash()
    assert logs(store) == alone
    replayed = [count for _, _, count in two.observer.admissions]
    assert replayed
    assert two.rig.stats.swapped_in > 0


def test_a_drain_takes_in_a_claim_that_is_on_its_way(tiny_folder, tiny_model):
    """Its answer was once left to the loop that had ended: the drain waited ten seconds and released nothing."""
    store = new_store()
    one = life(tiny_folder, tiny_model, store)
    wait_until(lambda: one.loop.state.scanned)
    gate, claim = threading.Event(), store.claim

    def slow_claim(*args, **kwargs):
        gate.wait(10)
        return claim(*args, **kwargs)

    store.claim = slow_claim
    submit(store, requests())
    one.wakeups.hint()
    wait_until(lambda: one.loop._claiming is not None)
    threading.Timer(0.3, gate.set).start()
    began = time.monotonic()
    one.drain()
    assert time.monotonic() - began < 8
    assert {store.get(job.sequence_id).status for job in requests()} == {JobStatus.QUEUED}
    assert {store.get(job.sequence_id).strikes for job in requests()} == {0}


def test_jobs_are_taken_in_beside_the_steps(tiny_folder, tiny_model, alone, monkeypatch):
    """Sixty long jobs of a dead engine took half a second, in which not one page of the first came in."""
    monkeypatch.setattr(loop, "_TAKING", 0.0)
    monkeypatch.setattr(Life, "_run", lambda self: None)
    store = new_store()
    submit(store, requests())
    one = life(tiny_folder, tiny_model, store)
    one.loop.begin(store.claim("e1", one.loop.identity.incarnation, held=[], free_pages=1000, limit=10))
    wait_until(lambda: one.loop._claiming.done())
    held = []
    for _ in range(len(LENGTHS)):
        assert one.loop.turn() == 0.0
        held.append(len(one.loop.held_jobs()))
        assert one.loop.state.scanned == (held[-1] == len(LENGTHS))
    assert held == [1, 2, 3, 4, 5]
    assert store.get("job-0").log_length > 0  # it did not wait for the others
    while not ended(store):
        one.loop.turn()
    one.crash()
    assert logs(store) == alone


def test_a_drain_gives_back_what_was_not_taken_in_yet(tiny_folder, tiny_model, monkeypatch):
    monkeypatch.setattr(loop, "_TAKING", 0.0)
    store = new_store()
    submit(store, requests())
    one = life(tiny_folder, tiny_model, store)
    wait_until(lambda: one.loop._claimed)
    one.drain()
    assert {store.get(job.sequence_id).status for job in requests()} == {JobStatus.QUEUED}
    assert {store.get(job.sequence_id).strikes for job in requests()} == {0}


class Spoiled:
    """A runner that gives no number for a prompt that begins with a certain token, and for its generated rows."""

    def __init__(self, runner, first_token):
        self._runner, self._first_token, self._tables = runner, first_token, set()

    def __getattr__(self, name):
        return getattr(self._runner, name)

    def run_chunk(self, token_ids, start, page_table, **how):
        logits = self._runner.run_chunk(token_ids, start, page_table, **how)
        if start == 0 and token_ids[0] == self._first_token:
            self._tables.add(int(page_table[0]))
        return logits

    def run_rows(self, token_ids, positions, page_tables, row_sequence, logits_rows):
        logits = self._runner.run_rows(token_ids, positions, page_tables, row_sequence, logits_rows).clone()
        for i, row in enumerate(logits_rows):
            if int(page_tables[row_sequence[row], 0]) in self._tables:
                logits[i, 3] = float("nan")
        return logits


def test_a_model_that_gives_no_number_for_a_job_fails_it_alone(tiny_folder, tiny_model, alone):
    """It was a crash of the engine, three times over, with every job on board."""
    store, jobs = new_store(), requests()
    submit(store, jobs)
    rig = make_rig(tiny_folder, tiny_model, host_pages=128)
    rig.engine._runner = Spoiled(rig.engine._runner, jobs[3].prompt_ids[0])
    one = Life(rig, store)
    wait_until(lambda: ended(store))
    one.crash()
    failed = store.get("job-3")
    assert (failed.status, failed.error.code, failed.strikes) == (JobStatus.FAILED, "invalid_logits", 0)
    assert logs(store) == {**alone, "job-3": alone["job-3"][:1]}


def test_a_job_of_a_newer_version_fails_alone(tiny_folder, tiny_model, alone):
    """It was a crash of the engine, at every start of a version that was put back."""
    store, jobs = new_store(), requests()
    submit(store, jobs)
    spec = json.dumps({"model": "tiny", "max_tokens": 5, "seed": 1, "speculate": True})
    store.submit(NewJob("newer", spec, (7, 8), "model", 5, "newer"), queue_limit=100)
    one = life(tiny_folder, tiny_model, store)
    wait_until(lambda: ended(store) and store.get("newer").status.terminal)
    one.crash()
    assert store.get("newer").error.code == "spec_unknown"
    assert "speculate" in store.get("newer").error.message
    assert logs(store) == alone


def test_a_log_that_its_grammar_refuses_fails_its_job_alone(tiny_folder, tiny_model, alone):
    store, jobs = new_store(), requests()
    spec = JobSpec("tiny", 50, 1, grammar=json_grammar({"type": "string"}))
    store.submit(NewJob("bound", spec.to_json(), (7, 8), "model", 50, "bound"), queue_limit=100)
    before = EngineUnderTest(store, model_fingerprint="model")
    before.register()
    owned = before.claim()
    before.commit("bound", *Tokenizer.from_file(str(tiny_folder / "tokenizer.json")).encode('"A"A').ids)
    before.release(*owned)
    submit(store, jobs)
    one = life(tiny_folder, tiny_model, store)
    wait_until(lambda: ended(store) and store.get("bound").status.terminal)
    one.crash()
    failed = store.get("bound")
    assert (failed.status, failed.error.code, failed.log_length) == (JobStatus.FAILED, "grammar_failed", 4)
    assert "token 3 of the log" in failed.error.message
    assert logs(store) == alone


def test_a_damaged_log_ends_its_job_and_no_other(tiny_folder, tiny_model, alone, monkeypatch):
    store = new_store()
    submit(store, requests())
    one = life(tiny_folder, tiny_model, store)
    wait_until(lambda: store.get("job-4").log_length > 4)
    one.crash()
    honest = store.read

    def damaged(reads):
        return [
            replace(piece, entries=(replace(piece.entries[0], token=piece.entries[0].token + 1), *piece.entries[1:]))
            if piece is not None and piece.record.job_id == "job-4" and piece.entries
            else piece
            for piece in honest(reads)
        ]

    monkeypatch.setattr(store, "read", damaged)
    two = life(tiny_folder, tiny_model, store, one)
    wait_until(lambda: ended(store))
    two.crash()
    monkeypatch.undo()
    assert store.get("job-4").status is JobStatus.FAILED
    assert store.get("job-4").error.code == "log_damaged"
    assert two.observer.lost_tokens == store.get("job-4").log_length
    assert {k: v for k, v in logs(store).items() if k != "job-4"} == {k: v for k, v in alone.items() if k != "job-4"}
