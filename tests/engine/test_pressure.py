"""More jobs than device pages: slower, never fewer, never wrong. Exactness is `==` on token ids."""

from dataclasses import replace

import pytest

from engine.scheduler import AGING_STEPS
from tests.rigs import CHUNK, PAGE_SIZE, make_rig, request

NUM_JOBS, NUM_FIT = 48, 8
LENGTHS = [3, 40, 16, 17, 33, 64, 9, 25]
PAGES = NUM_FIT * (max(LENGTHS) + 24) // PAGE_SIZE


def jobs():
    """Mixed lengths, greedy and seeded; some share the head of their prompts."""
    made = []
    for i in range(NUM_JOBS):
        job = request(f"job-{i}", LENGTHS[i % 8], seed=i if i % 2 else None, max_tokens=12 + i % 13, order=i)
        made.append(replace(job, prompt_ids=request("head", CHUNK).prompt_ids + job.prompt_ids) if i % 8 == 5 else job)
    return made


@pytest.fixture(scope="module")
def unpressured(tiny_folder, tiny_model):
    rig = make_rig(tiny_folder, tiny_model, pages=2000, max_running=8)
    for job in jobs():
        rig.add(job)
    return rig.run()


@pytest.mark.parametrize("eviction", ["fifo", "lru", "arc"])
@pytest.mark.parametrize("preemption", ["swap", "replay", "auto"])
def test_all_finish_with_the_tokens_they_have_without_pressure(tiny_folder, tiny_model, unpressured, preemption, eviction):
    rig = make_rig(
        tiny_folder,
        tiny_model,
        pages=PAGES // 2,
        max_running=32,
        host_pages=400,
        reserve=16,
        eviction=eviction,
        preemption=preemption,
        min_resident_steps=2,
    )
    for job in jobs():
        rig.add(job)
    assert rig.run() == unpressured
    rig.settle()
    rig.engine.check()
    assert rig.in_use == 0
    assert rig.problems == []
    assert rig.swapped or rig.dropped, "the pool was large enough: nothing was tested"
    assert preemption != "swap" or not rig.dropped
    assert preemption != "replay" or not rig.swapped
    assert rig.engine.residency.prefix.num_evictions > 0


def test_swapped_and_replayed_in_one_run(tiny_folder, tiny_model, unpressured):
    """A host pool that is soon full: who finds room there is swapped, the others are replayed."""
    rig = make_rig(
        tiny_folder, tiny_model, pages=PAGES // 2, max_running=32, host_pages=80, preemption="swap", min_resident_steps=1
    )
    for job in jobs():
        rig.add(job)
    assert rig.run() == unpressured
    rig.settle()
    rig.engine.check()
    assert rig.in_use == 0
    assert rig.swapped
    assert rig.dropped


def test_a_swapped_sequence_goes_on_without_computing_a_row_twice(tiny_folder, tiny_model):
    rig = make_rig(tiny_folder, tiny_model, pages=24, max_running=4, host_pages=200, preemption="swap", min_resident_steps=1)
    some = [request(f"s{i}", 20, max_tokens=40, order=i, seed=i) for i in range(3)]
    for job in some:
        rig.add(job)
    rows = 0
    while rig.engine.has_work:
        result = rig.step()
        rows += result.prompt_rows + result.generated_rows
    assert rig.swapped
    assert not rig.dropped
    assert rows == sum(len(job.prompt_ids) + job.max_tokens - 1 for job in some)
    assert rig.stats.swapped_in > 0


def test_admission_leaves_room_to_grow(tiny_folder, tiny_model):
    """Nobody is preempted before ``min_resident_steps`` steps; with more of them, nobody at all here."""
    preempted = {}
    for steps in (4, 8):
        rig = make_rig(tiny_folder, tiny_model, pages=PAGES // 2, max_running=32, host_pages=400, min_resident_steps=steps)
        stays, came, now = [], {}, 0
        for job in jobs():
            rig.add(job)
        while rig.engine.has_work:
            before = {s.id for s in rig.engine.scheduler.running}
            result = rig.step()
            now += 1
            stays += [now - came[sequence_id] for sequence_id in result.swapped_out + result.dropped]
            came |= dict.fromkeys({s.id for s in rig.engine.scheduler.running} - before, now)
        assert all(stay >= steps for stay in stays)
        preempted[steps] = len(stays)
    assert preempted[4] > preempted[8] == 0


def test_a_preempted_sequence_rises_until_it_runs(tiny_folder, tiny_model):
    """A stream of jobs with a higher priority must not keep it out for ever."""
    rig = make_rig(tiny_folder, tiny_model, pages=20, max_running=2, host_pages=200, min_resident_steps=1)
    rig.add(request("low", 30, max_tokens=45, order=0))
    for _ in range(4):
        rig.step()
    count = 0
    while "low" in rig.engine.sequence_ids:
        if len(rig.engine.sequence_ids) < 3:
            count += 1
            rig.add(request(f"high-{count}", 30, max_tokens=40, order=count, priority=2))
        rig.step()
        assert count < 40, "starved"
    assert "low" in rig.swapped
    assert len(rig.tokens["low"]) == 45
    assert count * 40 > 2 * AGING_STEPS  # it had to wait for its two levels


def test_forks_share_their_prompt_and_copy_before_they_write(tiny_folder, tiny_model):
    prompt = request("prompt", 2 * CHUNK + 6).prompt_ids  # its tail page is partly filled
    forks = [replace(request(f"f{i}", 4, seed=i, max_tokens=12, order=i), prompt_ids=prompt) for i in range(4)]
    alone = {}
    for job in forks:
        single = make_rig(tiny_folder, tiny_model)
        single.add(job)
        alone |= single.run()
    rig = make_rig(tiny_folder, tiny_model, host_pages=64)
    for job in forks:
        rig.add(job)
    rows = 0
    while rig.engine.has_work:
        result = rig.step()
        rows += result.prompt_rows
        if len(rig.engine.scheduler.running) == 4 and result.admissions:
            tables = [rig.cache.page_tables[f"f{i}"] for i in range(4)]
            assert tables[0] == tables[1] == tables[2] == tables[3]
    assert rig.tokens == alone
    assert rows == len(prompt)
    assert rig.stats.copied_on_write == 3  # the last one to write has the tail for itself
    assert len({tuple(tokens) for tokens in rig.tokens.values()}) == 4
    rig.settle()
    assert rig.in_use == 0


def test_a_hundred_jobs_compute_their_common_prefix_once(tiny_folder, tiny_model):
    head = request("head", 12 * CHUNK).prompt_ids
    shared = [request(f"j{i}", 3 + i % 5, max_tokens=4, order=i) for i in range(100)]
    shared = [replace(job, prompt_ids=head + job.prompt_ids) for job in shared]
    rig = make_rig(tiny_folder, tiny_model, pages=200, max_running=16, host_pages=400)
    for job in shared:
        rig.add(job)
    rows = 0
    while rig.engine.has_work:
        rows += rig.step().prompt_rows
    unique = len(head) + sum(len(job.prompt_ids) - len(head) for job in shared)
    assert unique <= rows <= 1.05 * unique
    rig.settle()
    again = make_rig(tiny_folder, tiny_model, pages=200, host_pages=400, backing=rig.backing, table=rig.table, first_page=3)
    last = replace(request("last", 7, max_tokens=4), prompt_ids=head + request("last", 7).prompt_ids)
    again.add(last)
    rows = 0
    while again.engine.has_work:
        rows += again.step().prompt_rows
    assert rows == 7
    single = make_rig(tiny_folder, tiny_model, pages=200)
    single.add(last)
    assert single.run() == again.tokens
