"""One child of the supervisor: how it ended, whether that was a crash, and when it may start again."""

import contextlib
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from signal import SIGHUP, SIGINT, SIGKILL, SIGTERM, Signals
from types import MappingProxyType

from service.processes import Exit, spawn, write_pid_file

HEALTHY_SECONDS = 60.0  #: a life this long forgets the deaths before it
_ORDERLY = (0, -SIGTERM, -SIGINT, -SIGHUP)  #: exit codes of what was asked to end
_LONGEST_PAUSE = {"crash": 30.0, "benign": 0.5}


class LastExit(StrEnum):
    """How the last life ended, as the jobs it held are to see it (PROTOCOL.md 4): only a crash adds a strike."""

    BENIGN = "benign"
    CRASH = "crash"


def classify(returncode: int, *, oom_killed: bool) -> LastExit:
    """SIGKILL from outside is no fault of a job; SIGKILL by the kernel for want of memory may be."""
    if returncode == -SIGKILL:
        return LastExit.CRASH if oom_killed else LastExit.BENIGN
    return LastExit.BENIGN if returncode in _ORDERLY else LastExit.CRASH


def oom_kills() -> int:
    """Processes that the kernel has killed for want of memory in our control group; in the machine where there is none.

    The kernel counts before it kills, so a rise is visible by the time the death is.
    """
    for path, key in _oom_counters():
        with contextlib.suppress(OSError, ValueError):
            for line in path.read_text().splitlines():
                name, _, value = line.partition(" ")
                if name == key:
                    return int(value)
    return 0


def _oom_counters() -> list[tuple[Path, str]]:
    root, counters = Path("/sys/fs/cgroup"), []
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            number, controllers, path = line.split(":", 2)
            if "memory" in controllers.split(","):
                counters += [(root / "memory" / path.lstrip("/") / "memory.oom_control", "oom_kill")]
                counters += [(root / "memory/memory.oom_control", "oom_kill")]  # seen from inside a container
            elif number == "0":
                counters += [(root / path.lstrip("/") / "memory.events", "oom_kill")]
                counters += [(root / "memory.events", "oom_kill")]
    return [*counters, (Path("/proc/vmstat"), "oom_kill")]


@dataclass(slots=True)
class Backoff:
    """At once after the first death, then after growing pauses; forgets after a healthy minute.

    Deaths that are no crash grow to half a second only: they come from outside, and who runs 100 kills wants 100 restarts.
    """

    deaths: int = 0

    def next_pause(self, lived: float, kind: LastExit) -> float:
        if lived >= HEALTHY_SECONDS:
            self.deaths = 0
        pause = 0.0 if self.deaths == 0 else min(0.25 * 2.0 ** min(self.deaths, 10), _LONGEST_PAUSE[kind])
        self.deaths += 1
        return pause


@dataclass(frozen=True, slots=True)
class Death:
    returncode: int
    kind: LastExit
    pause: float  #: seconds until it is started again
    refusal: str  #: what it said when it refused to start; "" otherwise

    @property
    def final(self) -> bool:
        return self.returncode == Exit.CONFIG


@dataclass(slots=True)
class Child:
    """``command`` gets ``--death-pipe FD``, and ``--last-exit KIND`` when ``tell_last_exit``."""

    name: str
    command: list[str]
    environment: Mapping[str, str]
    run_dir: Path
    tell_last_exit: bool = False
    has_standby: bool = False  #: another one waits beside it to take over
    inherits: tuple[int, ...] = ()  #: descriptors of ours that it gets: with them, another one can run beside it
    process: subprocess.Popen[bytes] | None = None
    start_at: float = 0.0  #: monotonic; when it is to be started (again)
    started: float = 0.0  #: monotonic
    #: before the first start: the supervisor or the machine went away, no crash of ours
    last_exit: LastExit = LastExit.BENIGN
    ended_orderly: bool = False
    _oom_kills: int = 0
    _backoff: Backoff = field(default_factory=Backoff)

    @property
    def running(self) -> bool:
        return self.process is not None

    @property
    def pid(self) -> int | None:
        return None if self.process is None else self.process.pid

    def start(self, death_pipe: int, *, tell: Mapping[str, int] = MappingProxyType({})) -> None:
        """``tell``: flag -> descriptor that it inherits for this."""
        refusal_file(self.run_dir, self.name).unlink(missing_ok=True)
        command = [*self.command, *(["--last-exit", self.last_exit] if self.tell_last_exit else [])]
        for flag, descriptor in tell.items():
            command += [flag, str(descriptor)]
        inherits = (*self.inherits, *tell.values())
        self.adopt(spawn(command, environment=self.environment, death_pipe=death_pipe, pass_fds=inherits))

    def adopt(self, process: subprocess.Popen[bytes]) -> None:
        """This process is it from now on."""
        self.started, self._oom_kills = time.monotonic(), oom_kills()
        self.process = process
        self.name_pid()

    def let_go(self) -> subprocess.Popen[bytes] | None:
        """The process, if there is one; it is no child of this name any more."""
        process, self.process = self.process, None
        if process is not None:
            self._unname_pid(process)
        return process

    def overlook_oom_kill(self) -> None:
        """One that was counted since the start, if one was, was another's."""
        self._oom_kills = min(self._oom_kills + 1, oom_kills())

    def another(self) -> "Child":
        """The same, not started."""
        return Child(self.name, self.command, self.environment, self.run_dir, inherits=self.inherits)

    def name_pid(self) -> None:
        if self.process is not None:
            write_pid_file(self._pid_file, self.process.pid)

    def reap(self) -> Death | None:
        """The death since the last call, if there was one; plans the next start."""
        if self.process is None or (code := self.process.poll()) is None:
            return None
        self._unname_pid(self.process)
        self.process = None
        self.last_exit = classify(code, oom_killed=oom_kills() > self._oom_kills)
        self.ended_orderly = code in _ORDERLY
        now = time.monotonic()
        pause = self._backoff.next_pause(now - self.started, self.last_exit)
        self.start_at = now + pause
        refusal = ""
        with contextlib.suppress(OSError):
            refusal = refusal_file(self.run_dir, self.name).read_text().strip()
        return Death(code, self.last_exit, pause, refusal)

    def signal(self, number: Signals) -> None:
        if self.process is not None:
            self.process.send_signal(number)

    def _unname_pid(self, process: subprocess.Popen[bytes]) -> None:
        with contextlib.suppress(OSError, ValueError):
            if int(self._pid_file.read_text()) == process.pid:  # else it names the one that runs in its place
                self._pid_file.unlink()

    @property
    def _pid_file(self) -> Path:
        return self.run_dir / f"{self.name}.pid"


def refusal_file(run_dir: Path, name: str) -> Path:
    """Where a child that exits 78 leaves its message, so that the supervisor's last line can say it."""
    return run_dir / f"{name}.refusal"
