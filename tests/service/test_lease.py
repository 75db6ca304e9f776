"""Who is dead, by one watcher's own eyes only."""

import pytest

from service.lease import EngineWatcher, pace
from service.settings import Settings
from storage.records import EngineInfo, EngineRecord

LEASE = 9.0


def record(engine_id="e", beat=1, incarnation="i", dead=False, job_ids=()):
    info = EngineInfo(engine_id, "boot", "host", 1, "pool", "f", "m", 16, 64, 512)
    return EngineRecord(info, incarnation, beat, dead, job_ids)


def watch(watcher, *steps):
    """Each step is (time, records); answers with (time, id) of each death."""
    return [(now, dead.info.engine_id) for now, records in steps for dead in watcher.dead(now, records)]


def test_a_beat_that_stands_still_for_a_lease_is_a_death():
    steps = [(t, [record()]) for t in range(9)]
    watcher = EngineWatcher(LEASE)
    assert watch(watcher, *steps) == []
    assert watch(watcher, (9, [record()])) == [(9, "e")]


def test_a_moving_beat_is_life():
    assert watch(EngineWatcher(LEASE), *((t, [record(beat=t // 8)]) for t in range(100))) == []


def test_a_new_incarnation_is_life():
    assert watch(EngineWatcher(LEASE), *((t, [record(incarnation=str(t // 8))]) for t in range(100))) == []


def test_failed_reads_are_no_evidence():
    watcher = EngineWatcher(LEASE)
    watch(watcher, *((t, [record()]) for t in range(8)))
    watcher.restart()
    assert watch(watcher, *((t, [record()]) for t in range(8, 17))) == []
    assert watch(watcher, (17, [record()])) == [(17, "e")]


def test_a_gap_in_our_own_reads_is_no_evidence():
    """This process was stopped, or the machine slept."""
    watcher = EngineWatcher(LEASE)
    watch(watcher, *((t, [record()]) for t in range(8)))
    assert watch(watcher, (1000, [record()]), (1003, [record()]), (1006, [record()])) == []
    assert watch(watcher, (1009, [record()])) == [(1009, "e")]


@pytest.mark.parametrize("lease", [1.0, 3.0, 4.0, 10.0, 3600.0])
def test_looks_at_our_pace_see_a_death_and_no_life_as_one(lease):
    """Each look comes half as late again as it should."""
    late = 1.5 * pace(lease)
    looks = [i * late for i in range(round(2 * lease / late) + 2)]
    assert watch(EngineWatcher(lease), *((t, [record()]) for t in looks))[:1] != []
    assert watch(EngineWatcher(lease), *((t, [record(beat=int(t / late))]) for t in looks)) == []


def test_a_lease_that_may_be_set_holds_several_beats():
    shortest = next(bound.ge for bound in Settings.model_fields["lease_seconds"].metadata if hasattr(bound, "ge"))
    assert pace(shortest) <= shortest / 3


def test_jobs_that_whoever_marked_it_dead_did_not_move_are_moved():
    assert watch(EngineWatcher(LEASE), (0, [record(dead=True, job_ids=("j",))])) == [(0, "e")]


def test_who_is_marked_dead_is_left_alone():
    assert watch(EngineWatcher(LEASE), *((t, [record(dead=True)]) for t in range(50))) == []


def test_only_the_dead_one_is_named():
    steps = [(t, [record("a", beat=t), record("b")]) for t in range(10)]
    assert watch(EngineWatcher(LEASE), *steps) == [(9, "b")]


@pytest.mark.parametrize("appears", [False, True])
def test_proof_of_life_is_a_move_that_we_saw(appears):
    watcher = EngineWatcher(LEASE)
    watch(watcher, (0, [] if appears else [record()]), (1, [record()]))
    assert watcher.living(1) == (frozenset({"e"}) if appears else frozenset())
    watch(watcher, (2, [record(beat=2)]))
    assert watcher.living(2) == frozenset({"e"})
    assert watcher.living(11) == frozenset()
