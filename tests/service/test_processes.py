"""Locks, pid files, and children that die with their parent."""

import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from service.children import HEALTHY_SECONDS, Backoff, LastExit, classify, oom_kills
from service.errors import AlreadyRunning, DirectoryError
from service.processes import FileLock, child_environment, describe_exit, prepare_directory, write_pid_file

ENVIRONMENT = {**os.environ, "PYTHONPATH": os.getcwd()}


def python(code, *arguments, **how):
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)], stdout=subprocess.PIPE, text=True, env=ENVIRONMENT, **how
    )


def gone(pid, within):
    deadline = time.monotonic() + within
    while time.monotonic() < deadline:
        try:
            if "State:\tZ" in Path(f"/proc/{pid}/status").read_text():
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.01)
    return False


POOR = """
import resource, sys
from service.errors import ServiceError
from service.processes import check_surroundings, harden
limit, value = getattr(resource, sys.argv[1]), int(sys.argv[2])
resource.setrlimit(limit, (min(64, value), value))
harden()
try:
    check_surroundings()
    print(resource.getrlimit(limit)[0])
except ServiceError as error:
    print(error)
"""


@pytest.mark.parametrize(("files", "said"), [(255, "ulimit -n 4096"), (256, "256"), (1000, "1000")])
def test_all_the_descriptors_there_are_are_taken_and_too_few_are_refused(files, said):
    output, _ = python(POOR, "RLIMIT_NOFILE", files).communicate(timeout=20)
    assert said in output


def test_no_directory_for_temporary_files_is_refused_with_the_fix():
    """torch looks for one as it is imported: the engine ended with a traceback, again and again."""
    output, _ = python(POOR, "RLIMIT_FSIZE", 0).communicate(timeout=20)  # nothing can be written anywhere
    assert "set TMPDIR" in output


HOLDER = """
import sys, time
from pathlib import Path
from service.processes import FileLock
with FileLock(Path(sys.argv[1]), "it").acquire():
    print("held", flush=True)
    time.sleep(60)
"""

PARENT = """
import os, sys, time
from service.processes import spawn
reader, writer = os.pipe()
child = spawn([sys.executable, "-c", sys.argv[1]], environment=dict(os.environ), death_pipe=reader)
print(child.pid, flush=True)
time.sleep(60)
"""

CHILD = """
import ctypes, sys, time
from service.processes import die_with_parent
if "no-pdeathsig" in {0!r}:
    ctypes.CDLL = lambda *a, **k: type("libc", (), {{"prctl": lambda *a: 0}})()
die_with_parent(int(sys.argv[sys.argv.index("--death-pipe") + 1]))
while True:
    time.sleep(1)
"""


def test_a_lock_names_its_holder_and_dies_with_it(tmp_path):
    path = tmp_path / "it.lock"
    holder = python(HOLDER, path)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    with pytest.raises(AlreadyRunning, match=f"it is already running: process {holder.pid} holds"):
        FileLock(path, "it").acquire()
    os.kill(holder.pid, signal.SIGSTOP)  # a stopped holder still holds
    with pytest.raises(AlreadyRunning):
        FileLock(path, "it").acquire(wait=0.2)
    holder.kill()
    holder.wait()
    holder.stdout.close()
    with FileLock(path, "it").acquire(wait=1.0) as lock:
        assert lock.holder() == os.getpid()


def test_a_lock_on_a_replaced_file_is_no_lock(tmp_path):
    path = tmp_path / "it.lock"
    with FileLock(path, "it").acquire():
        path.rename(tmp_path / "moved")
        with FileLock(path, "it").acquire():  # the name is free again, so this is another lock
            assert FileLock(tmp_path / "moved", "it").try_acquire() is False


@pytest.mark.parametrize("how", ["both", "no-pdeathsig"])
def test_children_die_when_the_parent_is_killed(how):
    parent = python(PARENT, CHILD.format(how))
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    time.sleep(0.3)
    assert not gone(child, 0.05)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    assert gone(child, 2.0)


def test_children_have_their_own_process_group():
    """Ctrl-C in the terminal reaches the supervisor alone, which then ends its children in order."""
    parent = python(PARENT, CHILD.format("both"))
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    assert os.getpgid(child) == child
    parent.kill()
    parent.wait()
    parent.stdout.close()
    assert gone(child, 2.0)


def test_pid_files_appear_whole(tmp_path):
    write_pid_file(tmp_path / "x.pid", 42)
    assert (tmp_path / "x.pid").read_text() == "42\n"
    assert [path.name for path in tmp_path.iterdir()] == ["x.pid"]


def test_directories_are_private_and_refusals_name_them(tmp_path):
    assert prepare_directory(tmp_path / "a" / "b").stat().st_mode & 0o777 == 0o700
    (tmp_path / "file").write_text("")
    with pytest.raises(DirectoryError, match="choose another --data-dir"):
        prepare_directory(tmp_path / "file" / "below")


def test_a_process_leaves_no_core_dump_and_private_files(tmp_path):
    code = (
        "import resource, sys; from service.processes import harden; harden();"
        "open(sys.argv[1], 'w').close(); print(resource.getrlimit(resource.RLIMIT_CORE))"
    )
    child = python(code, tmp_path / "f")
    out, _ = child.communicate(timeout=10)
    assert out == "(0, 0)\n"
    assert (tmp_path / "f").stat().st_mode & 0o777 == 0o600
    assert resource.getrlimit(resource.RLIMIT_CORE)  # our own is untouched


def test_our_own_variables_do_not_leak_into_children(monkeypatch):
    monkeypatch.setenv("MIDSENTENCE_PORT", "1")
    monkeypatch.setenv("MIDSENTENCE_TESTING", "1")
    environment = child_environment({"MIDSENTENCE_HOST": "h"})
    assert "MIDSENTENCE_PORT" not in environment
    assert (environment["MIDSENTENCE_HOST"], environment["MIDSENTENCE_TESTING"]) == ("h", "1")


@pytest.mark.parametrize(
    ("returncode", "oom", "kind"),
    [
        (0, False, "benign"),
        (-signal.SIGTERM, False, "benign"),
        (-signal.SIGKILL, False, "benign"),
        (-signal.SIGKILL, True, "crash"),
        (-signal.SIGSEGV, False, "crash"),
        (-signal.SIGABRT, False, "crash"),
        (-signal.SIGBUS, False, "crash"),
        (1, False, "crash"),
        (70, False, "crash"),
    ],
)
def test_only_what_a_job_may_have_caused_is_a_crash(returncode, oom, kind):
    assert classify(returncode, oom_killed=oom) == LastExit(kind)


def test_exits_are_described_for_people():
    assert [describe_exit(code) for code in (-9, -11, 70)] == ["SIGKILL", "SIGSEGV", "exit 70"]


def test_the_first_restart_is_at_once_and_a_healthy_minute_forgets():
    backoff = Backoff()
    pauses = [backoff.next_pause(1.0, LastExit.CRASH) for _ in range(10)]
    assert pauses[:4] == [0.0, 0.5, 1.0, 2.0]
    assert pauses[-1] == 30.0
    assert backoff.next_pause(HEALTHY_SECONDS, LastExit.CRASH) == 0.0
    kills = Backoff()
    assert max(kills.next_pause(1.0, LastExit.BENIGN) for _ in range(100)) == 0.5


def test_oom_kills_are_counted_somewhere():
    assert oom_kills() >= 0


@pytest.mark.skipif(
    not os.access("/sys/fs/cgroup/memory/tasks", os.W_OK) or os.geteuid() != 0, reason="needs root and cgroup v1 memory"
)
def test_a_real_oom_kill_is_seen(tmp_path):
    """A child that the kernel kills for want of memory: SIGKILL like any other, but the counter rose."""
    code = """
import os, signal, subprocess, sys
from pathlib import Path
own = next(l.split(":", 2)[2] for l in Path("/proc/self/cgroup").read_text().splitlines() if l.split(":")[1] == "memory")
group = Path("/sys/fs/cgroup/memory") / own.strip().lstrip("/") / f"midsentence-test-{os.getpid()}"
group.mkdir()
(group / "memory.limit_in_bytes").write_text("60000000")
(group / "cgroup.procs").write_text(str(os.getpid()))
from service.children import classify, oom_kills
before = oom_kills()
child = subprocess.run([sys.executable, "-c", "x = bytearray(200_000_000)"])
print(child.returncode, classify(child.returncode, oom_killed=oom_kills() > before))
(group.parent / "cgroup.procs").write_text(str(os.getpid()))
group.rmdir()
"""
    child = python(code)
    out, _ = child.communicate(timeout=20)
    assert out == "-9 crash\n"
