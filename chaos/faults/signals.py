"""Signals to processes, and second starts."""

import contextlib
import signal
import subprocess
import time
from dataclasses import dataclass

from chaos.cluster import Cluster
from chaos.faults.base import DRAIN_TIMEOUT, FOLLOW_TIMEOUT, Proof
from chaos.place import Engine
from chaos.processes import Timeout, wait_until
from service.processes import Exit


@dataclass(frozen=True, slots=True)
class Kill:
    """A signal to one process that the supervisor starts again: SIGKILL, or SIGTERM for an orderly end."""

    role: str
    number: signal.Signals = signal.SIGKILL

    @property
    def name(self) -> str:
        return f"{self.number.name} {self.role}"

    def apply(self, cluster: Cluster) -> Proof:
        old = cluster.signal(self.role, self.number)
        wait_until(lambda: cluster.family.gone(old), DRAIN_TIMEOUT, f"the end of {self.role} {old}")
        new = cluster.wait_changed(self.role, old)
        return Proof(True, f"{self.role} {old} is dead, {new} took its place")


@dataclass(frozen=True, slots=True)
class Succession:
    """SIGKILL to the engine ``seconds`` after another one began to wait beside it: that one must be the next engine."""

    seconds: float

    @property
    def name(self) -> str:
        return f"SIGKILL engine, {self.seconds:.1f} s after another began to wait"

    def apply(self, cluster: Cluster) -> Proof:
        heir = cluster.require_pid("standby")
        time.sleep(self.seconds)
        old = cluster.signal("engine", signal.SIGKILL)
        new = cluster.wait_changed("engine", old)
        return Proof(new == heir, f"engine {old} is dead, {new} took its place, {heir} had waited")


@dataclass(frozen=True, slots=True)
class KillTogether:
    """Several roles in one instant."""

    roles: tuple[str, ...]

    @property
    def name(self) -> str:
        return "SIGKILL " + "+".join(self.roles)

    def apply(self, cluster: Cluster) -> Proof:
        pids = {role: cluster.require_pid(role) for role in self.roles}
        for pid in pids.values():
            cluster.family.signal(pid, signal.SIGKILL)
        news = {role: cluster.wait_changed(role, pid) for role, pid in pids.items()}
        return Proof(True, ", ".join(f"{role} {pids[role]} -> {news[role]}" for role in self.roles))


@dataclass(frozen=True, slots=True)
class KillSupervisor:
    """Its children must follow it at once; the embedded Redis stays, for the next supervisor to attach to."""

    name: str = "SIGKILL supervisor"

    def apply(self, cluster: Cluster) -> Proof:
        children = {role: cluster.require_pid(role) for role in ("engine", "api")}
        old = cluster.signal("supervisor", signal.SIGKILL)
        wait_until(lambda: all(map(cluster.family.gone, [old, *children.values()])), FOLLOW_TIMEOUT, f"the end of {children}")
        redis = cluster.require_pid("redis", FOLLOW_TIMEOUT)
        with contextlib.suppress(Timeout):  # one that was just started (to wait, to replace another) first has to learn of it
            wait_until(lambda: cluster.family.living() == [redis], DRAIN_TIMEOUT, "the end of all others")
        left = [pid for pid in cluster.family.living() if pid != redis]
        return Proof(not left, f"supervisor {old}, {children} are dead; redis {redis} lives; else left: {left}")


@dataclass(frozen=True, slots=True)
class KillEverything:
    name: str = "SIGKILL everything"

    def apply(self, cluster: Cluster) -> Proof:
        pids = cluster.kill_all()
        return Proof(len(pids) >= 4, f"killed at once: {pids}")


@dataclass(frozen=True, slots=True)
class TerminateService:
    """SIGTERM to the supervisor: everything ends in order, Redis last, nothing is left."""

    name: str = "SIGTERM service"

    def apply(self, cluster: Cluster) -> Proof:
        old = cluster.signal("supervisor", signal.SIGTERM)
        started = time.monotonic()
        code = cluster.wait_exit("supervisor", DRAIN_TIMEOUT)
        took = time.monotonic() - started
        left = cluster.family.living()
        return Proof(code == 0 and not left, f"supervisor {old} ended with {code} after {took:.1f} s, left running: {left}")


@dataclass(frozen=True, slots=True)
class SecondStart:
    """``serve`` and ``engine`` once more on a directory in use: refused with 78, the first ones untouched."""

    name: str = "second start"

    def apply(self, cluster: Cluster) -> Proof:
        roles = ("supervisor", "engine", "api", "redis")
        before = {role: cluster.require_pid(role) for role in roles}
        codes = []
        for second in (cluster.serve_to_the_end, cluster.engine_again_beside):
            try:
                done = second()
            except subprocess.TimeoutExpired as running:
                return Proof(False, f"a second start was not refused: it still ran after {running.timeout:g} s")
            codes.append(done.returncode)
            if done.returncode != Exit.CONFIG:
                return Proof(False, f"a second start ended with {done.returncode}: {done.stderr[-300:]}")
        after = {role: cluster.pid(role) for role in roles}
        return Proof(before == after, f"second starts ended with {codes}; before {before}, after {after}")


@dataclass(frozen=True, slots=True)
class Suspend:
    """SIGSTOP for some seconds, then SIGCONT."""

    role: str
    seconds: float

    @property
    def name(self) -> str:
        return f"SIGSTOP {self.role} {self.seconds:g} s"

    def apply(self, cluster: Cluster) -> Proof:
        pid = cluster.signal(self.role, signal.SIGSTOP)
        started = time.monotonic()
        try:
            wait_until(lambda: time.monotonic() - started >= self.seconds, self.seconds + 1, "the pause", pause=0.1)
        finally:
            cluster.family.signal(pid, signal.SIGCONT)
        return Proof(cluster.pid(self.role) == pid, f"{self.role} {pid} stood still for {time.monotonic() - started:.1f} s")


@dataclass(frozen=True, slots=True)
class KillForGood:
    """SIGKILL to an engine that nobody starts again."""

    engine: Engine

    @property
    def name(self) -> str:
        return f"SIGKILL {self.engine.name} for good"

    def apply(self, cluster: Cluster) -> Proof:
        pid = cluster.signal(self.engine.name, signal.SIGKILL)
        wait_until(lambda: cluster.family.gone(pid), FOLLOW_TIMEOUT, f"the end of {self.engine.name}")
        return Proof(True, f"{self.engine.name} {pid} is dead")
