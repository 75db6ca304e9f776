"""The page map says what the books say, whatever the engine is doing."""

from collections import Counter
from dataclasses import replace

import pytest

from engine import page_map as letters
from engine.page_map import page_map
from tests.rigs import PAGE_SIZE, make_rig, request


def look(rig):
    scheduler = rig.engine.scheduler
    return page_map(rig.engine.residency, (*scheduler.running, *scheduler.arriving))


def check(rig):
    """Against the engine's own sums."""
    seen, residency = look(rig), rig.engine.residency
    device, host = Counter(seen.device.lower()), Counter(seen.host)
    assert len(seen.device) == rig.cache.gpu_manager.total_pages
    assert sum(device[letter] for letter in "oshl") == rig.in_use
    assert device[letters.FREE] == rig.cache.gpu_manager.free_count
    if residency.host is not None:
        assert len(seen.host) == residency.host.manager.total_pages
        assert host[letters.FREE] == residency.host.manager.free_count
    return seen


@pytest.mark.parametrize("preemption", ["swap", "replay"])
def test_it_adds_up_after_each_step_of_a_pool_that_is_too_small(tiny_folder, tiny_model, preemption):
    rig = make_rig(tiny_folder, tiny_model, pages=16, host_pages=40, preemption=preemption, min_resident_steps=1)
    for i in range(8):
        rig.add(request(f"job-{i}", 14, max_tokens=30, seed=i, order=i))
    seen = set()
    while rig.engine.has_work:
        rig.step()
        found = check(rig)
        seen |= set(found.device) | set(found.host)
    assert {letters.FREE, letters.OPEN, "S", "C", letters.BACKING} <= seen
    assert rig.swapped or rig.dropped
    assert (letters.SWAPPED in seen) == (preemption == "swap")
    rig.settle()
    at_rest = check(rig)
    assert set(at_rest.device) <= {letters.FREE, "c", "C"}
    assert at_rest.host.count(letters.PUBLISHED) == len(rig.table)


def test_a_full_page_is_a_capital_once_its_entry_is_durable(tiny_folder, tiny_model):
    rig = make_rig(tiny_folder, tiny_model, host_pages=16)
    rig.add(request("job", 2 * PAGE_SIZE, max_tokens=8))
    rig.engine.step()
    assert look(rig).device.startswith("ss")
    rig.engine.residency.copies.flush()
    while rig.engine.residency.in_flight:
        rig.engine.residency.collect(0.1)
    assert look(rig).device.startswith("ss")  # copied, but the store has not answered
    assert look(rig).host.startswith("dd")
    rig.exchange()
    assert look(rig).device.startswith("SS")
    assert look(rig).host.startswith("BB")


def test_pages_of_two_jobs_are_shared_and_then_cached(tiny_folder, tiny_model):
    rig = make_rig(tiny_folder, tiny_model)
    first = request("job", 4 * PAGE_SIZE, max_tokens=12)
    rig.add(first)
    rig.step()
    assert look(rig).device.startswith("ssss")
    rig.add(replace(first, sequence_id="twin", order=1))
    rig.step()
    assert look(rig).device.startswith("hhhh")
    rig.run()
    assert look(rig).device.startswith("cccc")  # without a host pool a crash costs every page


def test_pages_that_nobody_else_may_use_are_sealed_all_the_same(tiny_folder, tiny_model):
    """Of a job that began under another arithmetic: full, in no cache."""
    rig = make_rig(tiny_folder, tiny_model, host_pages=16)
    rig.add(replace(request("job", 2 * PAGE_SIZE, max_tokens=8), publishes=False))
    rig.step()
    assert check(rig).device.startswith("ss")
