"""Sealed pages out and back: restored, replayed and uninterrupted runs are equal, bit for bit."""

import threading
from dataclasses import replace

import numpy as np
import pytest
import torch

from engine.sequence import Request
from tests.rigs import CHUNK, PAGE_SIZE, make_rig, request


def jobs():
    lengths = [3, 40, 16, 17, 33, 64]
    return [request(f"job-{i}", n, seed=i if i % 2 else None, max_tokens=14 + 3 * i, order=i) for i, n in enumerate(lengths)]


def resumed(job, tokens) -> Request:
    return replace(job, generated_ids=tuple(tokens))


@pytest.fixture(scope="module")
def whole(tiny_folder, tiny_model):
    rig = make_rig(tiny_folder, tiny_model)
    for job in jobs():
        rig.add(job)
    return rig.run()


def run_until(rig, steps):
    for job in jobs():
        rig.add(job)
    for _ in range(steps):
        if rig.engine.has_work:
            rig.step()
    rig.settle()
    return {job.sequence_id: list(rig.tokens[job.sequence_id]) for job in jobs()}


@pytest.mark.parametrize("steps", [1, 2, 5, 9, 17])
def test_a_second_life_goes_on_from_pages(tiny_folder, tiny_model, whole, steps):
    first = make_rig(tiny_folder, tiny_model, host_pages=128)
    log = run_until(first, steps)
    second = make_rig(tiny_folder, tiny_model, host_pages=128, backing=first.backing, table=first.table, first_page=7)
    for job in jobs():
        if len(log[job.sequence_id]) < job.max_tokens:
            second.add(resumed(job, log[job.sequence_id]))
    second.run()
    second.settle()
    for job in jobs():
        if job.sequence_id in second.tokens:
            assert second.tokens[job.sequence_id] == whole[job.sequence_id]
    assert second.stats.swapped_in > 0
    assert second.problems == []
    assert second.in_use == 7


def test_restored_replayed_and_uninterrupted_pages_are_equal_bit_for_bit(tiny_folder, tiny_model):
    job = request("bits", 21, seed=8, max_tokens=40)
    rows = 21 + 30

    def pages(rig):
        return torch.stack([torch.stack(rig.cache.gather("bits", layer, rows)) for layer in range(tiny_model.num_layers)])

    uninterrupted = make_rig(tiny_folder, tiny_model, host_pages=64)
    uninterrupted.add(job)
    while len(uninterrupted.tokens["bits"]) < 31:
        uninterrupted.step()
    uninterrupted.settle()
    log = uninterrupted.tokens["bits"][:31]
    expected = pages(uninterrupted)
    for table in (uninterrupted.table, {}):
        again = make_rig(tiny_folder, tiny_model, host_pages=64, backing=uninterrupted.backing, table=table, first_page=5)
        again.add(resumed(job, log))
        again.step()
        while not again.engine.scheduler.running or again.engine.scheduler.running[0].num_stored < rows:
            again.step()
        assert again.stats.swapped_in == (rows // PAGE_SIZE if table else 0)
        assert torch.equal(pages(again).view(torch.int32), expected.view(torch.int32))
        assert again.run()["bits"] == uninterrupted.run()["bits"]


def test_a_flipped_bit_is_found_and_its_page_recomputed(tiny_folder, tiny_model, whole):
    first = make_rig(tiny_folder, tiny_model, host_pages=128)
    log = run_until(first, 9)
    victim = sorted(first.table)[3]
    first.backing.flip_bit(victim)
    second = make_rig(tiny_folder, tiny_model, host_pages=128, backing=first.backing, table=first.table)
    for job in jobs():
        if len(log[job.sequence_id]) < job.max_tokens:
            second.add(resumed(job, log[job.sequence_id]))
    second.run()
    assert second.stats.verify_failures == 1
    assert second.problems == ["page_verify_failed"]
    assert {k: v for k, v in whole.items() if k in second.tokens} == second.tokens


def test_a_page_is_pinned_while_it_is_copied(tiny_folder, tiny_model):
    """An abort in the middle of a copy must not hand the page to somebody else."""
    rig = make_rig(tiny_folder, tiny_model, host_pages=64)
    release = threading.Event()

    original = rig.backing.write_pages

    def slow(first, data):
        assert release.wait(60)
        return original(first, data)

    rig.backing.write_pages = slow
    rig.add(request("a", 22))
    rig.step()
    rig.step()
    before = rig.in_use
    rig.engine.abort("a")
    assert before > rig.in_use == rig.engine.residency.copies.pages_leaving > 0
    release.set()
    rig.settle()
    assert rig.in_use == 0
    rig.engine.check()


def test_entries_that_the_store_refused_ride_in_a_later_pipeline(tiny_folder, tiny_model):
    """Forgotten, their host pages would be neither found nor evicted until the next start."""
    rig = make_rig(tiny_folder, tiny_model, host_pages=12, reserve=4)
    for i in range(3):
        rig.add(request(f"r{i}", 18, max_tokens=6, order=i))
        rig.run()
        rig.settle()
    rig.add(request("last", 22, max_tokens=6))
    while rig.engine.has_work:
        rig.engine.step()
    while rig.engine.residency.in_flight:
        rig.engine.residency.collect(0.1)
    publish, drop = rig.checkpointer.take_writes()
    assert publish
    assert drop
    assert not rig.checkpointer.has_writes
    rig.checkpointer.not_written(publish, drop)
    assert rig.checkpointer.take_writes() == (publish, drop)


def test_a_failed_copy_is_never_published(tiny_folder, tiny_model):
    from storage.errors import PoolError

    rig = make_rig(tiny_folder, tiny_model, host_pages=64)

    def failing(first, data):
        raise PoolError("no space left on device")

    rig.backing.write_pages = failing
    rig.add(request("a", 20))
    rig.run()
    rig.settle()
    assert rig.table == {}
    assert rig.cache.cpu_manager.used_count == 0
    assert set(rig.problems) == {"checkpoint_failed"}


def test_a_full_host_pool_costs_backing_never_a_job(tiny_folder, tiny_model, whole):
    rig = make_rig(tiny_folder, tiny_model, host_pages=6)
    for job in jobs():
        rig.add(job)
    assert rig.run() == whole
    assert rig.stats.unbacked > 0


def test_the_least_recently_used_pages_make_room(tiny_folder, tiny_model):
    rig = make_rig(tiny_folder, tiny_model, host_pages=12, reserve=4)
    for i in range(6):
        rig.add(request(f"r{i}", 18, max_tokens=6, order=i))
        rig.run()
        rig.settle()
    assert rig.engine.residency.host.num_evictions > 0
    assert rig.stats.unbacked == 0
    assert rig.cache.cpu_manager.problems() == []


def test_the_same_prompt_again_finds_its_full_chunks(tiny_folder, tiny_model):
    rig = make_rig(tiny_folder, tiny_model, host_pages=64)
    one, two = request("same", 2 * CHUNK, seed=1), request("same", 2 * CHUNK, seed=2)
    rig.add(one)
    rig.run()
    rig.settle()
    rig.add(replace(two, sequence_id="again"))
    rig.run()
    assert rig.admissions["again"].restored_pages == 2 * CHUNK // PAGE_SIZE
    assert np.array_equal(rig.tokens["again"], make_alone(tiny_folder, tiny_model, two))


def make_alone(folder, model, job):
    rig = make_rig(folder, model)
    rig.add(job)
    return rig.run()[job.sequence_id]
