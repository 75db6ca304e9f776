"""What nobody used for the retention time is gone from the host pool, bytes and all; what is in use stays, and so do tokens."""

import time
from dataclasses import replace

import pytest

from engine.host_cache import ERASE
from storage.errors import PoolError
from tests.rigs import PAGE_SIZE, make_rig, request

RETENTION = 10_000.0


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def rig_of(tiny_folder, tiny_model, clock, **options):
    return make_rig(tiny_folder, tiny_model, host_pages=32, retention_seconds=RETENTION, clock=clock, **options)


def sweep(rig, clock):
    """A minute of an idle engine: long enough for all 32 pages, and nothing beside the retention."""
    for _ in range(60):
        clock.now += 1.0
        rig.engine.collect()
        while rig.cache.cpu_manager.held_by(ERASE):
            time.sleep(0.001)
            rig.engine.collect()
        rig.exchange()
        rig.engine.check()


def test_pages_of_old_jobs_become_zeros(tiny_folder, tiny_model, clock):
    rig = rig_of(tiny_folder, tiny_model, clock)
    old, young = request("old", 30, max_tokens=8), request("young", 30, max_tokens=8)
    rig.add(old)
    tokens = list(rig.run()["old"])
    rig.settle()
    old_pages = dict(rig.table)
    assert len(old_pages) >= 30 // PAGE_SIZE
    assert all(rig.backing.pages[page].any() for page in old_pages)
    clock.now = RETENTION - 100
    sweep(rig, clock)
    rig.add(young)
    rig.run()
    rig.settle()
    assert rig.table.keys() > old_pages.keys()
    clock.now = RETENTION + 1
    sweep(rig, clock)
    assert rig.table
    assert not rig.table.keys() & old_pages.keys()
    dirty = {page for page in range(32) if rig.backing.pages[page].any()}
    assert dirty == rig.table.keys()
    again = rig_of(tiny_folder, tiny_model, clock, backing=rig.backing, table=rig.table)  # and nothing depends on them
    again.add(replace(old, sequence_id="again"))
    assert again.run()["again"] == tokens


def test_what_a_crash_left_without_an_entry_is_zeroed_at_once(tiny_folder, tiny_model, clock):
    rig = rig_of(tiny_folder, tiny_model, clock)
    rig.add(request("a", 30, max_tokens=8))
    rig.run()
    rig.settle()
    kept, lost = sorted(rig.table)[:3], sorted(rig.table)[3:]
    assert lost
    before = rig.backing.pages[kept].copy()
    entries = {page: rig.table[page] for page in kept}
    second = rig_of(tiny_folder, tiny_model, clock, backing=rig.backing, table=entries)
    sweep(second, clock)
    assert second.table.keys() == set(kept)
    assert (rig.backing.pages[kept] == before).all()
    assert not rig.backing.pages[lost].any()


def test_a_job_longer_than_the_retention_keeps_its_pages(tiny_folder, tiny_model, clock):
    job = request("long", 30, max_tokens=40)
    alone = make_rig(tiny_folder, tiny_model)
    alone.add(job)
    rig = rig_of(tiny_folder, tiny_model, clock)
    rig.add(job)
    while rig.engine.has_work:
        rig.step()
        clock.now += RETENTION if rig.engine.has_work else 0.0
    rig.settle()
    assert rig.tokens == alone.run()
    assert len(rig.table) == (30 + 40 - 1) // PAGE_SIZE


def test_a_page_that_cannot_be_zeroed_is_told_and_costs_nothing_else(tiny_folder, tiny_model, clock):
    rig = rig_of(tiny_folder, tiny_model, clock)
    zero_page = rig.backing.zero_page

    def failing(page):
        raise PoolError("input/output error")

    rig.backing.zero_page = failing
    sweep(rig, clock)
    assert set(rig.problems) == {"erase_failed"}
    assert rig.engine.residency.host.free_count == 32
    rig.backing.zero_page = zero_page
    rig.backing.pages[:] = 1
    clock.now += 2 * RETENTION
    sweep(rig, clock)
    assert not rig.backing.pages.any()


def test_never_more_than_a_few_pages_at_a_time(tiny_folder, tiny_model, clock):
    rig = rig_of(tiny_folder, tiny_model, clock)
    host = rig.engine.residency.host
    for _ in range(5):
        before = host.free_count
        rig.engine.collect()
        assert before - host.free_count <= 32 // 8
        clock.now += 1.0


def test_a_mistake_of_ours_ends_the_loop(tiny_folder, tiny_model, clock):
    rig = rig_of(tiny_folder, tiny_model, clock)
    rig.backing.zero_page = None
    with pytest.raises(TypeError):
        sweep(rig, clock)
