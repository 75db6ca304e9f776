"""Which runs begin when, and what is said of those for which there is no time."""

import argparse
import math

import pytest

from chaos import __main__ as command
from chaos.report import Row
from chaos.scenarios import SCENARIOS
from chaos.stage import Outcome


@pytest.fixture
def ran(monkeypatch):
    """Runs that do nothing, in the order in which they began."""
    begun = []

    def run(base, scenario, catalogue, model, arguments, seed, number):
        begun.append(scenario)
        return Row(scenario.name, number, seed, 0.0, Outcome((), (), 0, 0))

    monkeypatch.setattr(command, "_run", run)
    monkeypatch.setattr(command, "_catalogue", lambda *_: ("tiny", None))
    return begun


def run_all(tmp_path, minutes, seed=1):
    arguments = argparse.Namespace(minutes=minutes, runs=None, tier="ci", parallel=1, model="tiny")
    return command._run_all(tmp_path, arguments, list(SCENARIOS), seed)


def test_the_longest_begin_first_and_are_shown_in_their_own_order(ran, tmp_path):
    rows, left_out = run_all(tmp_path, math.inf)
    assert left_out == []
    assert [scenario.seconds for scenario in ran] == sorted((scenario.seconds for scenario in ran), reverse=True)
    assert [(row.scenario, row.run) for row in rows] == [(s.name, n) for s in SCENARIOS for n in range(s.runs["ci"])]


def test_without_time_everything_is_left_out_and_named(ran, tmp_path):
    rows, left_out = run_all(tmp_path, 0.0)
    assert (rows, ran) == ([], [])
    assert sorted(left_out) == sorted(f"{s.name} run {n}" for s in SCENARIOS for n in range(s.runs["ci"]))


def test_with_little_time_nothing_begins_that_usually_takes_longer(ran, tmp_path):
    rows, left_out = run_all(tmp_path, 5.0)
    assert {scenario.name for scenario in ran} == {s.name for s in SCENARIOS if s.seconds < 300.0 and s.runs["ci"]}
    assert len(rows) + len(left_out) == sum(s.runs["ci"] for s in SCENARIOS)
    assert [scenario.seconds for scenario in ran] != sorted((scenario.seconds for scenario in ran), reverse=True)


def test_those_that_take_as_long_begin_in_another_order_with_each_seed(ran, tmp_path):
    run_all(tmp_path, math.inf, seed=1)
    first = list(ran)
    ran.clear()
    run_all(tmp_path, math.inf, seed=2)
    assert first != ran
    assert sorted(s.name for s in first) == sorted(s.name for s in ran)
