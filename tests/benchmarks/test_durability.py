"""The pure parts of the durability benchmark: figures, rates, timelines."""

import json

import pytest

from benchmarks.durability.amplification import sealed_pages
from benchmarks.durability.figures import Figure, Goal, Section, median_error, median_ratio, slope, table
from benchmarks.durability.setup import LogEvent, Options, log_events, pages_for
from benchmarks.durability.streams import Stream
from benchmarks.durability.throughput import OFF, ON, order
from benchmarks.durability.timeline import PARTS, START, NoRecovery, recovery, start_phases

PHASES = {"imports": 1.5, "model": 1.0, "store": 0.25, "pools": 0.5, "page_table": 0.125, "registration": 0.125}


@pytest.mark.parametrize(
    ("goal", "value", "verdict"),
    [
        (Goal("<=", 1), 1.0, "yes"), (Goal("<=", 1), 1.01, "no"), (Goal(">=", 50), 49.9, "no"), (Goal(">=", 50), 50, "yes"),
        (Goal("=", 1), 1.004, "yes"), (Goal("=", 1), 1.006, "no"), (None, 3, ""),
    ],
)  # fmt: skip
def test_a_figure_is_held_against_its_goal(goal, value, verdict):
    assert Figure("x", value, goal=goal).verdict == verdict


def test_a_table_shows_goals_beside_figures_and_notes_below():
    section = Section([Figure("speed", 1234.5, "tok/s"), Figure("cost", 2.0, "%", Goal("<=", 1))], {}, ["64 jobs were left out."])
    shown = table("throughput", section)
    assert "| speed | 1,234 | tok/s |  |  |" in shown
    assert "| cost | 2 | % | <= 1 | no |" in shown
    assert shown.endswith("64 jobs were left out.")
    assert json.loads(json.dumps(section.as_json()))["figures"][1]["met"] == "no"


def test_ratios_are_taken_round_by_round():
    assert median_ratio([(10, 10), (50, 100), (9, 10)]) == 0.9  # one slow round moves neither side's share


def test_the_slope_of_a_line_and_of_a_point():
    assert slope([(0, 5), (100, 205), (200, 405)]) == pytest.approx(2)
    assert slope([(0, 5)]) == 0


def test_the_error_of_a_median_shrinks_with_the_number_of_turns():
    assert median_error([1.0] * 10) == 0
    few, many = (median_error([1 + i / count for i in range(count)]) for count in (10, 1000))
    assert 0 < many < few


def test_sides_go_first_in_turns():
    assert [order(number)[0] for number in range(4)] == [ON, OFF, ON, OFF]
    assert {frozenset(order(number)) for number in range(2)} == {frozenset((ON, OFF))}


def test_the_last_token_seals_nothing():
    assert [sealed_pages(16, n) for n in (1, 16, 17)] == [1, 1, 2]


def test_the_first_token_after_a_moment():
    stream = Stream("job", [1.0, 2.0, 3.0])
    assert (stream.count, stream.first_after(1.0), stream.first_after(2.5), stream.first_after(3.0)) == (3, 2.0, 3.0, None)


def test_pages_leave_room_for_every_job(tmp_path):
    assert pages_for(64, 2000) >= 64 * 125
    quick = Options(tmp_path, tmp_path).quick()
    assert max(quick.kill_jobs) < 64


def test_a_log_that_several_write_to_is_read_for_one():
    lines = [
        "supervisor says hello",
        '{"timestamp": "2026-01-02T03:04:05.500000Z", "event": "ready", "process": "engine", "jobs": 2}',
        '{"timestamp": "2026-01-02T03:04:06Z", "event": "ready", "process": "api"}',
        '["no", "object"]',
        '{"timestamp": "cut in mid',
    ]
    (event,) = log_events("\n".join(lines))
    assert (event.event, event.fields["jobs"], event.at % 60) == ("ready", 2, 5.5)


def events(*resumed, registered=103.75, taken=(104.0,)):
    return [
        LogEvent(50.0, "registered", {"phases": {"imports": 9.0}}),
        LogEvent(51.0, "job_resumed", {"pages_restored": 99, "tokens_replayed": 99}),  # of an earlier life
        LogEvent(registered, "registered", {"phases": PHASES}),
        *(LogEvent(at, "job_taken", {}) for at in taken),
        *(LogEvent(at, "job_resumed", {"pages_restored": 10, "tokens_replayed": 3}) for at in resumed),
    ]


def test_the_parts_of_a_recovery_add_up_to_the_first_token():
    arrivals = [[99.0, 100.01, 104.75, 105.0, 105.25], [98.0, 105.5, 105.75]]  # 100.01: committed before the kill
    found = recovery(events(104.25, 105.0, taken=(103.9, 104.0)), 100.0, arrivals)
    assert tuple(found.parts) == PARTS
    assert sum(found.parts.values()) == pytest.approx(found.first) == pytest.approx(4.75)
    assert found.parts["detection"] == pytest.approx(0.25)
    assert found.start == pytest.approx(sum(PHASES[name] for name in START))
    assert found.parts["metadata"] == pytest.approx(0.25)
    assert found.parts["pages"] == pytest.approx(0.25)
    assert (found.parts["step"], found.parts["replay"]) == (pytest.approx(0.25), pytest.approx(0.25))
    assert (found.last, found.all_pages, found.all_replayed) == (pytest.approx(5.5), pytest.approx(1.0), pytest.approx(0.5))
    assert (found.pages_restored, found.tokens_replayed) == (20, 6)


def test_a_recovery_that_did_not_happen_is_said():
    with pytest.raises(NoRecovery, match="no engine registered"):
        recovery(events(104.25), 110.0, [[111.0]])
    with pytest.raises(NoRecovery, match="1 of 2 jobs were resumed, 1 clients"):
        recovery(events(104.25), 100.0, [[104.5], [99.0]])


def test_a_start_is_told_by_its_phases():
    assert start_phases(events(), 60.0) == PHASES
