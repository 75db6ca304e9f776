"""The supervisor from outside: signals in, processes and lines of text out. Engine and api are stand-ins; Redis is real."""

import os
import queue
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import redis

from service.errors import SettingsError
from service.redis_server import EmbeddedRedis
from service.settings import Settings
from service.supervisor import KILL_ENGINE, serve

RIG = Path(__file__).with_name("supervisor_rig.py")


class Supervised:
    def __init__(self, data_dir, script="steady", drain=5.0, demo_controls=False, standby=False):
        self.data_dir = data_dir
        more = [*(["demo"] if demo_controls else []), *(["standby"] if standby else [])]
        self.process = subprocess.Popen(
            [sys.executable, str(RIG), str(data_dir), script, str(drain), *more],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.getcwd()},
        )
        self.said = []
        self._lines = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self):
        for line in self.process.stdout:
            self._lines.put(line.rstrip("\n"))

    def hear(self, text, timeout=10.0):
        """Wait for a line with ``text``."""
        deadline = time.monotonic() + timeout
        while not any(text in line for line in self.said):
            try:
                self.said.append(self._lines.get(timeout=max(0.01, deadline - time.monotonic())))
            except queue.Empty:
                raise AssertionError(f"{text!r} was not said, but {self.said}") from None
        return next(line for line in self.said if text in line)

    def pid(self, name, other_than=0, timeout=10.0):
        """Of the process that the pid file names, once it names one and that lives."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            try:
                pid = int((self.data_dir / "run" / f"{name}.pid").read_text())
                if pid != other_than and Path(f"/proc/{pid}").exists():
                    return pid
            except (OSError, ValueError):
                pass
            time.sleep(0.01)
        raise AssertionError(f"no {name}")

    def starts(self, count, timeout=10.0):
        deadline = time.monotonic() + timeout
        while True:
            try:
                lines = (self.data_dir / "starts").read_text().split("\n")[:-1]
            except OSError:
                lines = []
            if len(lines) >= count:
                return lines
            assert time.monotonic() < deadline, lines
            time.sleep(0.01)

    def end(self, number=signal.SIGTERM, timeout=15.0):
        self.process.send_signal(number)
        return self.wait(timeout)

    def wait(self, timeout=15.0):
        code = self.process.wait(timeout)
        self._reader.join(5)
        while not self._lines.empty():
            self.said.append(self._lines.get())
        self.process.stdout.close()
        return code


@pytest.fixture
def supervise(tmp_path):
    running = []

    def make(**how):
        running.append(Supervised(tmp_path / "data", **how))
        return running[-1]

    yield make
    for one in running:
        if one.process.poll() is None:
            one.process.kill()
            one.wait()
    server = EmbeddedRedis(tmp_path / "data")
    try:
        server.attach()
    except Exception:
        return
    server.kill()


def alive(pid):
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def handles(pid, number):
    """Whether a process has a handler for a signal."""
    (caught,) = (line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("SigCgt:"))
    return bool(int(caught.split()[1], 16) >> (number - 1) & 1)


def soon_dead(pid, timeout=15.0):
    deadline = time.monotonic() + timeout
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    return not alive(pid)


def test_it_starts_three_and_ends_them_in_order(supervise, tmp_path):
    one = supervise()
    assert sorted(one.starts(2)) == ["api ", "engine benign"]
    pids = {name: one.pid(name) for name in ("engine", "api", "redis", "supervisor")}
    assert pids["supervisor"] == one.process.pid
    assert one.end() == 0
    assert all(soon_dead(pid) for pid in pids.values())
    assert not list((tmp_path / "data" / "run").glob("*.pid"))
    assert "ready to exit" in (tmp_path / "data" / "redis" / "redis.log").read_text()


@pytest.mark.parametrize(("number", "kind"), [(signal.SIGKILL, "benign"), (signal.SIGSEGV, "crash")])
def test_a_killed_engine_is_started_at_once_and_told_how_it_ended(supervise, number, kind):
    one = supervise()
    one.starts(2)
    engine, api = one.pid("engine"), one.pid("api")
    os.kill(engine, number)
    assert one.hear("engine died") == f"engine died ({number.name}), starting again now"
    assert one.pid("engine", other_than=engine) != engine
    assert one.starts(3)[2] == f"engine {kind}"
    assert one.pid("api") == api  # nothing else was touched
    assert one.end() == 0


def test_a_demos_button_kills_the_engine_and_nothing_else(supervise):
    one = supervise(script="steady", demo_controls=True)
    one.starts(2)
    engine, api = one.pid("engine"), one.pid("api")
    os.kill(one.process.pid, KILL_ENGINE)  # as ask_to_kill_engine does, in the api
    assert one.pid("engine", other_than=engine) != engine
    assert one.hear("engine died (SIGKILL)")
    assert one.starts(3)[-1] == "engine benign"  # no job is to blame
    assert one.pid("api") == api
    assert one.end() == 0


def test_others_cannot_be_given_the_button():
    with pytest.raises(SettingsError, match="--demo-controls: host"):
        serve(Settings(host="0.0.0.0", allow_anonymous=True), demo_controls=True)


@pytest.mark.parametrize(("number", "kind"), [(signal.SIGKILL, "benign"), (signal.SIGSEGV, "crash")])
def test_an_engine_that_waits_takes_over_and_is_told_how_the_other_ended(supervise, number, kind):
    one = supervise(standby=True)
    waiting, engine, api = one.pid("standby", timeout=30.0), one.pid("engine"), one.pid("api")
    os.kill(engine, number)
    assert one.pid("engine", other_than=engine) == waiting
    assert one.starts(3)[2] == f"engine after waiting {kind}"
    assert one.pid("api") == api
    another = one.pid("standby", other_than=waiting, timeout=30.0)
    assert one.end() == 0
    assert all(map(soon_dead, (waiting, another)))
    assert not list((one.data_dir / "run").glob("*.pid"))


def test_after_an_orderly_end_an_engine_is_started_anew(supervise):
    """Whoever replaced code or weights ends the engine so; one that waits has the old ones."""
    one = supervise(standby=True)
    waiting, engine = one.pid("standby", timeout=30.0), one.pid("engine")
    os.kill(engine, signal.SIGTERM)
    assert one.pid("engine", other_than=engine) != waiting
    assert one.starts(3)[2] == "engine benign"
    assert soon_dead(waiting)


def test_the_death_of_one_that_waits_disturbs_nobody(supervise):
    one = supervise(standby=True)
    waiting, engine = one.pid("standby", timeout=30.0), one.pid("engine")
    os.kill(waiting, signal.SIGKILL)
    one.hear("the engine in waiting died (SIGKILL)")
    another = one.pid("standby", other_than=waiting, timeout=30.0)
    assert one.pid("engine") == engine
    os.kill(another, signal.SIGKILL)
    os.kill(engine, signal.SIGKILL)  # in the same moment: who is dead or dying is no heir
    assert one.pid("engine", other_than=engine) != another
    assert len(one.starts(3)) == 3


def test_who_waits_follows_its_supervisor(supervise):
    one = supervise(standby=True)
    waiting = one.pid("standby", timeout=30.0)
    one.process.kill()
    one.wait()
    assert soon_dead(waiting)


def test_a_killed_redis_is_started_again_where_it_was(supervise, tmp_path):
    one = supervise()
    one.starts(2)
    url = f"unix://{tmp_path}/data/run/redis.sock"
    with redis.Redis.from_url(url) as client:
        client.set("token", "42")
    before = {name: one.pid(name) for name in ("engine", "api", "redis")}
    os.kill(before["redis"], signal.SIGKILL)
    one.hear("redis died (SIGKILL), starting again")
    one.pid("redis", other_than=before["redis"])
    with redis.Redis.from_url(url, decode_responses=True) as client:
        assert client.get("token") == "42"
    assert (one.pid("engine"), one.pid("api")) == (before["engine"], before["api"])
    assert one.end() == 0


def test_a_crash_loop_slows_down(supervise):
    one = supervise(script="crashing")
    one.hear("engine died (SIGABRT), starting again now")
    one.hear("engine died (SIGABRT), starting again in 0.5 s")
    one.hear("engine died (SIGABRT), starting again in 1.0 s")
    assert one.end() == 0


def test_a_refusal_stops_everything_with_its_message(supervise):
    one = supervise(script="refusing")
    redis_pid = one.pid("redis")
    assert one.wait() == 78
    assert one.said[-1] == "engine cannot run: pool is of another model (use another --data-dir)"
    assert soon_dead(redis_pid)


def test_a_second_supervisor_is_refused_with_the_first_ones_pid(supervise):
    one = supervise()
    one.starts(2)
    second = subprocess.run(
        [sys.executable, "-m", "service.cli", "serve", "--data-dir", str(one.data_dir)],
        capture_output=True,
        text=True,
        timeout=20,
    )
    assert second.returncode == 78
    assert f"process {one.process.pid} holds" in second.stderr
    assert one.process.poll() is None
    assert one.end() == 0


def test_kill_9_takes_engine_and_api_along_and_leaves_redis_for_the_next(supervise):
    one = supervise()
    one.starts(2)
    engine, api, redis_pid = (one.pid(name) for name in ("engine", "api", "redis"))
    one.process.kill()
    one.wait()
    assert soon_dead(engine)
    assert soon_dead(api)
    assert alive(redis_pid)
    two = supervise()
    assert two.starts(4)[2:] != []
    assert two.pid("redis") == redis_pid
    assert two.end() == 0
    assert soon_dead(redis_pid)


def test_a_second_signal_ends_at_once(supervise):
    one = supervise(script="deaf", drain=60.0)
    one.starts(2)
    one.process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    assert one.process.poll() is None  # the deaf engine is given its time
    began = time.monotonic()
    assert one.end(signal.SIGINT) == 0
    assert time.monotonic() - began < 20.0


def test_a_child_that_does_not_end_is_killed_after_the_drain(supervise):
    one = supervise(script="deaf", drain=0.5)
    one.starts(2)
    engine = one.pid("engine")
    assert one.end() == 0
    assert "engine did not end in time: killed" in "\n".join(one.said)
    assert soon_dead(engine)


def test_a_stop_while_redis_is_stuck_is_heard(supervise):
    one = supervise()
    one.starts(2)
    redis_pid = one.pid("redis")
    one.process.kill()
    one.wait()
    os.kill(redis_pid, signal.SIGSTOP)
    two = supervise()
    while not handles(two.process.pid, signal.SIGTERM):
        time.sleep(0.01)
    time.sleep(0.5)
    assert two.process.poll() is None
    assert two.end() == 0
    os.kill(redis_pid, signal.SIGCONT)
    assert alive(redis_pid)
