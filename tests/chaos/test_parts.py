"""The parts of the chaos suite that decide nothing about the product, but would hide a fault if they were wrong."""

import signal
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest

from chaos.client import parse_sse
from chaos.cluster import free_ports
from chaos.dump import Metrics
from chaos.faults import Proof, inflict, page_extent
from chaos.history import Call, Event, FaultRecord, History, JobSeen, StreamClosed, StreamOpened
from chaos.plans import as_said_or_better
from chaos.processes import Family, Timeout, wait_until
from chaos.scenarios import POINTS, SCENARIOS, TIERS
from chaos.stage import Outcome
from chaos.workload import TINY, Answer, make_cases, with_stop


def test_a_history_comes_back_from_its_file_as_it_was(tmp_path: Path):
    records = [
        Call("c0", "get", 1.0, 2.0, 200, "job_1", seen=JobSeen("completed", (1, 2), "é", "stop")),
        Call("c0", "submit", 1.0, 2.0, None, case="a", key="k", error="reset"),
        StreamOpened("c0", "job_1", 1, 2.0, None, 200),
        Event("c0", "job_1", 1, 3.0, "token", 1, 0, (7,), "x"),
        StreamClosed("c0", "job_1", 1, 4.0, "terminal"),
        FaultRecord("SIGKILL engine", 1.0, 2.0, True, "1 -> 2"),
    ]
    history = History(tmp_path / "history.jsonl")
    for record in records:
        history.add(record)
    history.close()
    assert list(History.read(tmp_path / "history.jsonl")) == records
    assert history.tokens == 1


def test_events_are_whole_or_not_at_all():
    lines = [
        "event: queued",
        "data: {}",
        "",
        ": ping",
        "",
        "id: 1",
        "event: token",
        'data: {"a":',
        "data: 1}",
        "",
        "id: 2",
        "data: cut",
    ]
    events = list(parse_sse(iter(lines)))
    assert [(e.name, e.id, e.data) for e in events] == [("queued", None, "{}"), ("token", "1", '{"a":\n1}')]


def test_metrics_add_up_over_labels_and_refuse_unknown_names():
    text = '# HELP x\nmidsentence_a_total{x="1"} 2.0\nmidsentence_a_total{x="2"} 3.0\nmidsentence_b 0.25\n'
    assert Metrics(text)["a_total"] == 5.0
    assert Metrics(text)["b"] == 0.25
    with pytest.raises(KeyError):
        Metrics(text)["c"]


def test_equal_seeds_make_equal_cases_and_all_fit_the_context():
    cases = make_cases(Random("s"), TINY, 24)
    assert cases == make_cases(Random("s"), TINY, 24)
    assert len({case.name for case in cases}) == 24
    for case in cases:
        prompt = case.body["prompt"]
        assert (len(prompt) if isinstance(prompt, list) else len(prompt.encode())) + case.max_tokens <= 512
    assert any(case.body["temperature"] == 0 for case in cases)
    assert any("seed" in case.body for case in cases)


def test_a_stop_string_is_one_that_the_answer_reaches_once_past_the_middle():
    case = make_cases(Random("s"), TINY, 1)[0]
    text = "abcdefghijklmnop"
    stopped = with_stop(case, Answer("completed", (1,), text, "length"), Random(1))
    assert stopped is not None
    (stop,) = stopped.body["stop"]
    assert text.find(stop) >= len(text) // 2
    assert with_stop(case, Answer("completed", (1,), "�" * 20, "length"), Random(1)) is None


def test_a_family_knows_its_orphans_and_no_strangers(tmp_path: Path):
    family, stranger = Family(tmp_path), Family(tmp_path / "other")
    code = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'], start_new_session=True)"
    parent = family.start([sys.executable, "-c", code], environment={}, log=tmp_path / "log", folder=Path("/"))
    parent.wait(20)
    wait_until(lambda: len(family.living()) == 1, 10.0, "the orphan")
    (orphan,) = family.living()
    assert stranger.living() == []
    assert not stranger.signal(orphan, signal.SIGKILL)
    assert len(family.end()) == 1
    assert family.living() == []
    assert family.gone(orphan)


def test_a_process_without_the_mark_is_known_by_its_directory(tmp_path: Path):
    """A Redis server overwrites its environment with its title: found when none of them was ever killed."""
    family = Family(tmp_path)
    unmarked = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], cwd=tmp_path)
    try:
        wait_until(lambda: family.living() == [unmarked.pid], 10.0, "the process in our directory")
    finally:
        family.end()
        unmarked.kill()
    assert unmarked.wait(10) == -signal.SIGKILL


def test_the_environment_of_a_run_has_no_settings_of_this_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MIDSENTENCE_PAGE_SIZE", "1")
    assert "MIDSENTENCE_PAGE_SIZE" not in Family(tmp_path).environment({})


def test_what_does_not_come_true_is_a_timeout_that_says_what():
    with pytest.raises(Timeout, match="a miracle"):
        wait_until(lambda: False, 0.02, "a miracle")


def test_a_fault_that_times_out_is_recorded_as_one_that_did_not_fire():
    class Late:
        name = "late"

        def apply(self, cluster: object) -> Proof:
            raise Timeout("no new engine")

    history = History()
    assert not inflict(Late(), None, history).fired
    (record,) = history.all(FaultRecord)
    assert (record.name, record.fired, record.proof) == ("late", False, "no new engine")


def test_a_run_is_good_only_when_every_fault_fired_and_nothing_was_found():
    fired, missed = FaultRecord("a", 0.0, 1.0, True, ""), FaultRecord("b", 0.0, 1.0, False, "")
    assert Outcome((), (fired,), 1, 1).good
    assert not Outcome((), (), 1, 1).good
    assert not Outcome((), (fired, missed), 1, 1).good
    assert not Outcome((), (fired,), 1, 1, problems=("died",)).good


def test_a_page_lies_where_the_file_says(tmp_path: Path):
    numpy = pytest.importorskip("numpy")
    from safetensors.numpy import save_file

    path = tmp_path / "pool.safetensors"
    save_file({"kv_pages": numpy.arange(24, dtype=numpy.int32).reshape(3, 8)}, path)
    begin, size = page_extent(path, 2)
    assert size == 32
    assert path.read_bytes()[begin : begin + size] == numpy.arange(16, 24, dtype=numpy.int32).tobytes()


def test_free_ports_differ():
    assert len(set(free_ports(5))) == 5


def test_every_scenario_has_counts_for_every_tier_and_every_point_a_name_of_its_own():
    for scenario in SCENARIOS:
        assert set(scenario.runs) == set(scenario.faults) == set(TIERS)
        assert all(scenario.faults[tier] > 0 for tier in TIERS)
    assert len(set(POINTS)) == len(POINTS)
    kills = next(scenario for scenario in SCENARIOS if scenario.name == "engine_kills")
    assert kills.runs["ci"] * kills.faults["ci"] >= 100


def test_a_recovery_may_do_better_than_its_plan_never_worse():
    said = (3, 113)
    assert as_said_or_better(said, said)
    assert as_said_or_better(said, (7, 1))
    assert as_said_or_better(said, (4, 113))
    for worse in ((2, 113), (3, 114), (3, 112), (7, 114)):
        assert not as_said_or_better(said, worse)
