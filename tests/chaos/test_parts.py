"""The parts of the chaos suite that decide nothing about the product, but would hide a fault if they were wrong."""

import contextlib
import importlib.util
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from random import Random

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from chaos.client import parse_sse
from chaos.clock import Clock, build, no_clock
from chaos.dump import Metrics
from chaos.faults.base import Proof, inflict
from chaos.faults.crowds import NEVER_READ, connections
from chaos.faults.damage import page_extent
from chaos.history import Call, Event, FaultRecord, History, JobSeen, StreamClosed, StreamOpened
from chaos.memory import MemoryGroup, no_memory_group
from chaos.mistakes import MISTAKES, InScenario, Stale, copy_sources, put_back
from chaos.mistakes import check as check_mistake
from chaos.netns import Link, cut, dropped, no_own_network, own_network
from chaos.page import PROMISES
from chaos.place import ROOT, after, free_ports
from chaos.plans import as_said_or_better
from chaos.points import ALL_POINTS, API_POINTS, FEWEST, PAGE_POINTS, POINTS, count_points, rare_points
from chaos.processes import Family, Timeout, wait_until
from chaos.proxy import Crumbs, Cut, Proxy, Silence
from chaos.report import Row, Suite, keep, kind_of, write_report
from chaos.scenario import TIERS
from chaos.scenarios import SCENARIOS
from chaos.stage import Outcome
from chaos.workload import TINY, Answer, make_cases, with_stop
from tests.servers import running_redis, valkey_binary


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


def test_what_was_shown_is_the_most_that_any_answer_or_stream_had():
    history = History()
    history.add(Event("c0", "job_1", 1, 1.0, "token", 3, 2, (9,), "x"))
    history.add(Call("c0", "get", 1.0, 2.0, 200, "job_1", seen=JobSeen("in_progress", (7, 8), "é")))
    history.add(Call("c0", "get", 1.0, 2.0, 200, "job_2", seen=JobSeen("in_progress", (7,), "é")))
    history.add(Event("c0", "job_2", 1, 3.0, "done", 9))
    assert history.shown() == {"job_1": 3, "job_2": 1}


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


@pytest.mark.skipif(bool(no_own_network()), reason=no_own_network())
def test_a_cut_takes_the_packets_of_its_direction_and_nobody_is_told():
    with own_network(), socket.create_server(("127.0.1.1", 0)) as server:
        link = Link("here", "127.0.1.1", server.getsockname()[1])
        with socket.create_connection((link.host, link.port), timeout=10) as client, server.accept()[0] as served:
            served.settimeout(0.5)
            with cut(link, requests=True, replies=False):
                client.sendall(b"lost")  # as far as it knows, it was sent
                served.sendall(b"comes")
                assert client.recv(5) == b"comes"
                with pytest.raises(TimeoutError):
                    served.recv(4)
                assert sum(dropped()) > 0
            served.settimeout(10)
            assert served.recv(4) == b"lost"  # sent again, once the way is free
            with cut(link, requests=False, replies=True):
                served.sendall(b"lost")
                client.settimeout(0.5)
                with pytest.raises(TimeoutError):
                    client.recv(4)


@pytest.mark.skipif(bool(no_own_network()), reason=no_own_network())
def test_a_network_of_our_own_is_left_behind_with_its_rules():
    home = os.readlink("/proc/thread-self/ns/net")
    with own_network():
        assert os.readlink("/proc/thread-self/ns/net") != home
        inside = subprocess.run(["nft", "list", "tables"], capture_output=True, text=True, check=True).stdout
        assert "chaos" in inside
    assert os.readlink("/proc/thread-self/ns/net") == home
    assert "chaos" not in subprocess.run(["nft", "list", "tables"], capture_output=True, text=True, check=True).stdout


def test_connections_are_those_of_one_port_with_what_is_unsent():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as reads, socket.socket() as never:
            never.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            never.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, 536)
            with server.accept()[0]:
                never.connect(("127.0.0.1", port))
                with server.accept()[0] as unread:
                    unread.setblocking(False)
                    unread.send(b"x" * 100_000)
                    found = connections(port)
                    assert set(found) == {reads.getsockname()[1], never.getsockname()[1]}
                    assert NEVER_READ.shows(found[never.getsockname()[1]])
                    assert not NEVER_READ.shows(found[reads.getsockname()[1]])
        assert connections(port) == {}


def test_free_ports_differ():
    assert len(set(free_ports(5))) == 5


def test_every_scenario_has_counts_for_every_tier_and_every_point_a_name_of_its_own():
    for scenario in SCENARIOS:
        assert set(scenario.runs) == set(scenario.faults) == set(TIERS)
        assert all((scenario.faults[tier] > 0) == (scenario.runs[tier] > 0) for tier in TIERS)
        assert scenario.runs["ci"] > 0
    assert len({scenario.name for scenario in SCENARIOS}) == len(SCENARIOS)
    assert len(set(POINTS)) == len(POINTS)
    kills = next(scenario for scenario in SCENARIOS if scenario.name == "engine_kills")
    assert kills.runs["ci"] * kills.faults["ci"] >= 100


@pytest.mark.parametrize("tier", ["ci", "soak"])
def test_a_whole_run_reaches_each_named_point_often_enough(tier: str):
    by_name = {scenario.name: scenario for scenario in SCENARIOS}
    tried = {"failpoint_kills": POINTS, "pressure_kills": PAGE_POINTS, "api_failpoint_kills": API_POINTS}
    counts = Counter[str]()
    for name, points in tried.items():
        counts.update(dict.fromkeys(points, by_name[name].runs[tier] * by_name[name].faults[tier]))
    assert rare_points(counts) == {}


def test_every_promise_is_tried_by_scenarios_that_are_there():
    names = {scenario.name for scenario in SCENARIOS}
    for _, by in PROMISES.values():
        assert set(by) <= names


def test_known_mistakes_fit_the_sources_and_where_each_is_found_is_there():
    for mistake in MISTAKES:
        check_mistake(mistake)
        if isinstance(mistake.where, InScenario):
            assert mistake.where.name in {scenario.name for scenario in SCENARIOS}
        else:
            assert importlib.util.find_spec(f"{mistake.where.name}.__main__")


def test_a_mistake_is_not_found_by_whatever_else_breaks():
    (mistake,) = (mistake for mistake in MISTAKES if mistake.name == "TTL as death")
    own = "I5 -: an engine that lived was declared dead 1 times"
    assert mistake.own(["I8 -: still queued at the end", "ClusterError: serve ended with 78", own]) == [own]
    for each in MISTAKES:
        assert not each.own(
            ["ClusterError: serve ended with 78", "tests.model ended with 1: ImportError", "Timeout: not within 90 s: x"]
        )


def test_a_mistake_is_in_a_copy_alone_and_for_a_while(tmp_path: Path):
    (mistake,) = (mistake for mistake in MISTAKES if mistake.name == "no checksum")
    copy = copy_sources(tmp_path)
    path = "engine/swap.py"
    before = (ROOT / path).read_text()
    with put_back(mistake, copy):
        assert mistake.edits[0].old not in (copy / path).read_text()
        assert (ROOT / path).read_text() == before
        with pytest.raises(Stale, match="0 times"):
            check_mistake(mistake, copy)
    assert (copy / path).read_text() == before


def test_a_report_is_a_page_with_every_scenario(tmp_path: Path):
    fault = FaultRecord("SIGKILL engine", 0.0, 1.0, True, "1 -> 2")
    row = Row("engine_kills", 0, 7, 60.0, Outcome((), (fault, fault), 3, 44))
    write_report(tmp_path / "report.json", Suite("ci", 7, "tiny", 0.0, 60.0, (row,)))
    text = (tmp_path / "report.md").read_text()
    assert "**2 of 2 faults fired, 3 jobs, 44 tokens received by clients, 0 violations.**" in text
    assert "- SIGKILL engine: 2" in text
    assert json.loads((tmp_path / "report.json").read_text())["scenarios"][0]["by_fault"] == {"SIGKILL engine": 2}
    assert "Not run" not in text


def test_a_report_names_what_was_left_out(tmp_path: Path):
    write_report(tmp_path / "report.json", Suite("ci", 7, "tiny", 0.0, 60.0, (), ("long_run run 0", "crowds run 1")))
    assert json.loads((tmp_path / "report.json").read_text())["left_out"] == ["long_run run 0", "crowds run 1"]
    assert "**Not run for want of time: long_run run 0, crowds run 1.**" in (tmp_path / "report.md").read_text()


def test_a_report_counts_each_named_point_over_all_runs(tmp_path: Path):
    runs = [Counter({"claim.after": 2}), Counter({"claim.after": 1, "commit.after_send": 4})]
    rows = tuple(Row("engine_kills", run, 7, 60.0, Outcome((), (), 3, 44, failpoints=fired)) for run, fired in enumerate(runs))
    write_report(tmp_path / "report.json", Suite("ci", 7, "tiny", 0.0, 60.0, rows))
    counts = json.loads((tmp_path / "report.json").read_text())["failpoints"]
    assert (counts["claim.after"], counts["commit.after_send"], counts["cow.after"]) == (3, 4, 0)
    assert "| `claim.after` | 3 |" in (tmp_path / "report.md").read_text()


def test_a_point_that_only_slept_or_fired_rarely_is_no_proof():
    lines = [*["claim.after kill 1"] * FEWEST, *["commit.after_send kill 2"] * (FEWEST - 1), *["cow.after sleep 3"] * FEWEST]
    rare = rare_points(count_points(lines))
    assert "claim.after" not in rare
    assert rare["commit.after_send"] == FEWEST - 1
    assert rare["cow.after"] == 0


def test_every_named_point_of_the_sources_is_counted():
    """Those whose names are made of data: of a prompt's first token, of a copy's direction."""
    sources = [path for package in ("engine", "storage", "recovery", "service") for path in (ROOT / package).rglob("*.py")]
    texts = [path.read_text() for path in sources if path.name != "failpoints.py"]
    named = {name for text in texts for name in re.findall(r'(?:hit|reached|after_send=)\(?f?"([a-z_]+\.[a-z_]+)"', text)}
    named |= {f"swap.{when}_{way}" for when in ("before", "after") for way in ("in", "out")}
    assert named == set(ALL_POINTS)


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        ("failpoint commit.after_send@3", "failpoint commit.after_send"), ("bit flip in host page 17", "bit flip in host page N"),
        ("reply cut after 31 bytes", "reply cut after N bytes"), ("SIGSTOP redis 5.25 s", "SIGSTOP redis N s"),
    ],
)  # fmt: skip
def test_faults_are_counted_by_kind(fault: str, kind: str):
    assert kind_of(fault) == kind


def test_a_proxy_passes_on_cuts_and_keeps_silent(tmp_path: Path):
    with running_redis(valkey_binary(), tmp_path / "valkey") as server:
        proxy = Proxy(tmp_path / "proxy.sock", Path(server.url.removeprefix("unix://")))

        def client(timeout: float = 5.0) -> redis.Redis:
            return redis.Redis(unix_socket_path=str(proxy.path), socket_timeout=timeout, retry=Retry(NoBackoff(), 0))

        try:
            proxy.rule = Crumbs()
            assert client().set("a", "b" * 1000)
            for rule, key in ((Cut(request=False, after=1), "counted"), (Cut(request=True, after=5), "not counted")):
                proxy.rule = None
                connected = client()
                connected.ping()
                proxy.rule = rule
                with pytest.raises(redis.ConnectionError):
                    connected.incr(key)
                assert rule.fired
            proxy.rule = Silence(request=True)
            with pytest.raises(redis.TimeoutError):
                client(0.2).incr("not counted")
            proxy.rule = None
            assert (client().get("counted"), client().get("not counted")) == (b"1", None)
        finally:
            proxy.close()


def test_a_recovery_may_do_better_than_its_plan_never_worse():
    said = (3, 113)
    assert as_said_or_better(said, said)
    assert as_said_or_better(said, (7, 1))
    assert as_said_or_better(said, (4, 113))
    for worse in ((2, 113), (3, 114), (3, 112), (7, 114)):
        assert not as_said_or_better(said, worse)


_SHOW_CLOCKS = """
import time
for _ in range(2):
    print(time.time(), time.monotonic(), flush=True)
    time.sleep(0.01)
    input()
"""


@pytest.mark.skipif(bool(no_clock()), reason=no_clock() or "there is one")
def test_a_wall_clock_is_set_in_a_living_process_and_its_monotonic_one_goes_on(tmp_path: Path):
    clock = Clock(tmp_path / "clock", build(tmp_path / "clock.so"))
    command = after(clock.prelude, [sys.executable, "-c", _SHOW_CLOCKS])
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin
        assert process.stdout
        shown = []
        for ahead in (0, -3600):
            wall, monotonic = map(float, process.stdout.readline().split())
            shown.append((wall - time.time(), monotonic - time.monotonic()))
            clock.put(-3600)
            process.stdin.write("\n")
            process.stdin.flush()
            assert shown[-1] == (pytest.approx(ahead, abs=5), pytest.approx(0, abs=5))
    assert process.returncode == 0


@pytest.mark.skipif(bool(no_memory_group()), reason=no_memory_group() or "there is one")
def test_the_kernel_kills_for_want_of_memory_and_counts_it(tmp_path: Path):
    with contextlib.closing(MemoryGroup()) as group:
        group.limit(32 << 20)
        command = after(group.prelude, [sys.executable, "-c", "print(len(b'x' * (64 << 20)))"])
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=30)
        assert (done.returncode, group.oom_kills) == (-signal.SIGKILL, 1)


def test_a_failed_run_is_kept_with_its_verdict(tmp_path):
    outcome = Outcome((), (), 1, 2, problems=("no fault",), failpoints=Counter({"claim.after": 3}))
    (tmp_path / "run").mkdir()
    kept = keep(Row("one", 0, 7, 1.0, outcome), tmp_path / "run", tmp_path / "report", "again")
    verdict = json.loads((kept / "verdict.json").read_text())
    assert (verdict["again"], verdict["failpoints"], verdict["problems"]) == ("again", {"claim.after": 3}, ["no fault"])
