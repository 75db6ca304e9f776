"""Processes of the product, seen from outside: which are ours, which live, how they are ended.

A process is ours when its environment carries this run's mark: children and grandchildren inherit it, so that even one whose
parents are all dead is found, and a pid that was used again by a stranger is never signalled. A Redis writes its title over its
environment, so a process that works in a directory of this run is ours, too.
"""

import contextlib
import os
import secrets
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

MARK = "CHAOS_RUN"
_POLL = 0.01
_Result = TypeVar("_Result")


#: Set at Ctrl-C: every wait of this driver ends, in every thread, and what was started is ended behind it.
STOP = threading.Event()


class Timeout(Exception):
    """Something that should have come true did not, in time."""


def wait_until(condition: Callable[[], bool], timeout: float, what: str, pause: float = _POLL) -> None:
    """Raises Timeout naming ``what``, KeyboardInterrupt once ``STOP`` is set."""
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() >= deadline:
            raise Timeout(f"not within {timeout:g} s: {what}")
        if STOP.wait(pause):
            raise KeyboardInterrupt


def environment_of(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return b""


def is_zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] in (b"Z", b"X")
    except (OSError, IndexError):
        return True


def is_stopped(pid: int) -> bool:
    """SIGSTOP has taken effect in every thread: none is in a system call any more."""
    try:
        states = [(task / "stat").read_bytes().rpartition(b")")[2].split()[0] for task in Path(f"/proc/{pid}/task").iterdir()]
    except (OSError, IndexError):
        return False
    return set(states) == {b"T"}


def command_of(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    return ""


@dataclass(frozen=True, slots=True)
class Vitals:
    """What a process holds."""

    pid: int
    threads: int
    descriptors: int
    resident: int  #: bytes


def vitals(pid: int) -> Vitals:
    """Raises OSError when it is gone."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    descriptors = len(os.listdir(f"/proc/{pid}/fd"))
    return Vitals(pid, int(status["Threads"]), descriptors, int(status["VmRSS"].split()[0]) * 1024)


@dataclass(slots=True)
class Family:
    """All processes started by one run of one cluster, directly or not."""

    place: Path  #: directory of this run
    mark: str = field(default_factory=lambda: secrets.token_hex(8))
    _started: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def environment(self, extra: Mapping[str, str]) -> dict[str, str]:
        """This process's environment without settings of the product, with the mark and ``extra``."""
        kept = {key: value for key, value in os.environ.items() if not key.startswith("MIDSENTENCE_")}
        return kept | {MARK: self.mark} | dict(extra)

    def start(self, command: Sequence[str], *, environment: Mapping[str, str], log: Path, folder: Path) -> subprocess.Popen[bytes]:
        """Start a process in a session of its own: a Ctrl-C in the terminal reaches the driver alone, which then cleans up."""
        with open(log, "ab") as output:
            process = subprocess.Popen(
                command,
                env=self.environment(environment),
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._started.append(process)
        return process

    def owns(self, pid: int) -> bool:
        if f"{MARK}={self.mark}".encode() in environment_of(pid).split(b"\0"):
            return True
        try:
            return Path(os.readlink(f"/proc/{pid}/cwd")).is_relative_to(self.place)
        except OSError:
            return False

    def living(self) -> list[int]:
        """Pids of all processes of this family that are not dead."""
        self.reap()
        return [int(name) for name in os.listdir("/proc") if name.isdigit() and self.owns(int(name)) and not is_zombie(int(name))]

    def signal(self, pid: int, number: signal.Signals) -> bool:
        """Send a signal to one of ours. False when it is dead or not ours."""
        if not self.owns(pid):
            return False
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            return False
        return True

    @contextlib.contextmanager
    def standstill(self) -> Iterator[None]:
        """All of them stopped, in no system call: what is read meanwhile is one moment's state."""
        pids = self.living()
        for pid in pids:
            self.signal(pid, signal.SIGSTOP)
        try:
            wait_until(lambda: all(is_stopped(pid) or self.gone(pid) for pid in pids), 10.0, "a standstill")
            yield
        finally:
            for pid in pids:
                self.signal(pid, signal.SIGCONT)

    def gone(self, pid: int) -> bool:
        self.reap()
        return not self.owns(pid) or is_zombie(pid)

    def reap(self) -> None:
        for process in self._started:
            process.poll()

    def end(self) -> list[str]:
        """Kill whatever is left, by pid, until nothing is. Answers with what there was."""
        left: list[str] = []
        deadline = time.monotonic() + 10.0
        while (pids := self.living()) and time.monotonic() < deadline:
            left += [f"{pid} {command_of(pid)[:120]}" for pid in pids]
            for pid in pids:
                self.signal(pid, signal.SIGCONT)
                self.signal(pid, signal.SIGKILL)
            time.sleep(0.05)
        for process in self._started:  # one that is just dying has no environment any more, and is no zombie yet
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
        return left


def beside(count: int, calls: Sequence[Callable[[], _Result]]) -> list[_Result]:
    """All calls, ``count`` at once; their results in order. Ctrl-C ends them all."""
    with ThreadPoolExecutor(count) as pool:
        futures = [pool.submit(call) for call in calls]
        try:
            return [future.result() for future in futures]
        except BaseException:
            STOP.set()
            for future in futures:
                future.cancel()
            raise
