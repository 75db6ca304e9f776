"""What the plan foretells is what the next life does, job by job and number by number."""

import random

import pytest

from recovery.plan import Action, Observation, ObservedJob, plan
from storage.records import JobStatus, LogRead
from tests.lives import life, new_store, submit, wait_until
from tests.rigs import CHUNK, PAGE_SIZE, request

LENGTHS = [3, 40, 16, 17, 33, 21]


def requests():
    return [request(f"job-{i}", n, seed=i if i % 2 else None, max_tokens=16 + 6 * i, order=i) for i, n in enumerate(LENGTHS)]


def observation(store, backing, *, engine_id="e1", model="model", arithmetic="arithmetic"):
    jobs = []
    for job in requests():
        (piece,) = store.read([LogRead(job.sequence_id)])
        jobs.append(ObservedJob(piece.record, piece.entries))
    scratch = backing.pages[0].copy()
    return Observation(
        engine_id=engine_id,
        model_fingerprint=model,
        arithmetic_fingerprint=arithmetic,
        page_size=PAGE_SIZE,
        prefill_chunk=CHUNK,
        jobs=tuple(jobs),
        table=store.pool_table("pool-e1"),
        page_ok=lambda page, entry: backing.read_pages(page, scratch) == [entry.checksum],
    )


@pytest.fixture
def crashed(tiny_folder, tiny_model):
    """A store and a pool in the state that a crash left."""
    store = new_store()
    submit(store, requests())
    one = life(tiny_folder, tiny_model, store)
    wait_until(lambda: store.get("job-5").log_length > 10)
    one.crash()
    one.rig.engine.residency.close()
    return store, one


def do_it(folder, model, store, before):
    two = life(folder, model, store, before, blame=True)
    wait_until(lambda: all(store.get(job.sequence_id).status.terminal for job in requests()))
    two.crash()
    return {job_id: (restored, replayed) for job_id, restored, replayed in two.observer.admissions}


def test_the_next_life_does_what_was_planned(tiny_folder, tiny_model, crashed):
    store, one = crashed
    planned = plan(observation(store, one.rig.backing))
    assert planned.bad_pages == ()
    foretold = {job.job_id: (job.pages_restored, job.tokens_replayed) for job in planned.jobs}
    assert {job.action for job in planned.jobs} <= {Action.RESUME, Action.REPLAY}
    assert any(job.pages_restored for job in planned.jobs)
    assert do_it(tiny_folder, tiny_model, store, one) == foretold


@pytest.mark.parametrize("seed", range(4))
def test_damage_shows_in_the_plan_and_costs_replay_only(tiny_folder, tiny_model, crashed, seed):
    store, one = crashed
    rng = random.Random(seed)
    table = store.pool_table("pool-e1")
    for page in rng.sample(sorted(table), 3):
        one.rig.backing.flip_bit(page)
    planned = plan(observation(store, one.rig.backing))
    foretold = {job.job_id: (job.pages_restored, job.tokens_replayed) for job in planned.jobs}
    assert do_it(tiny_folder, tiny_model, store, one) == foretold


def test_jobs_of_another_model_wait_and_none_is_failed(crashed):
    store, one = crashed
    planned = plan(observation(store, one.rig.backing, model="another"))
    assert {job.action for job in planned.jobs} == {Action.WAIT}
    assert all("waiting for model model" in job.reason for job in planned.jobs)


def test_jobs_of_another_engine_are_left_to_it(crashed):
    store, one = crashed
    planned = plan(observation(store, one.rig.backing, engine_id="e9"))
    assert {job.action for job in planned.jobs if store.get(job.job_id).status is JobStatus.IN_PROGRESS} == {Action.ELSEWHERE}


def test_a_jobs_own_record_says_by_which_arithmetic_its_pages_are_known(crashed):
    store, one = crashed
    seen = observation(store, one.rig.backing, arithmetic="another")
    planned = plan(seen)
    # These jobs committed tokens, so their own record says by which arithmetic their pages are known.
    assert any(job.pages_restored for job in planned.jobs)
