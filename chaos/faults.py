"""What is done to the service. Each fault can prove that it happened: a run whose fault did not fire is a failed run."""

import json
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, Protocol

from chaos.cluster import Cluster, Engine, fired_failpoints
from chaos.history import FaultRecord, History, now
from chaos.processes import Timeout, wait_until
from service.processes import Exit

#: Death by the parent's death: the kernel tells at once, a busy machine takes its time.
FOLLOW_TIMEOUT = 5.0
#: An orderly end takes at most this long (the drain), and a little more on a loaded machine.
DRAIN_TIMEOUT = 25.0
FAILPOINT_TIMEOUT = 90.0


@dataclass(frozen=True, slots=True)
class Proof:
    fired: bool
    text: str


class Fault(Protocol):
    @property
    def name(self) -> str: ...

    def apply(self, cluster: Cluster) -> Proof: ...


def inflict(fault: Fault, cluster: Cluster, history: History) -> Proof:
    """Apply and record. What does not come true in time is a fault that did not fire."""
    started = now()
    try:
        proof = fault.apply(cluster)
    except Timeout as problem:
        proof = Proof(False, str(problem))
    history.add(FaultRecord(fault.name, started, now(), proof.fired, proof.text))
    return proof


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
        for second in (cluster.serve_again_beside, cluster.engine_again_beside):
            done = second()
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


@dataclass(frozen=True, slots=True)
class Failpoint:
    """The engine kills itself at a named point, at its n-th hit in this life. Points of the drain are reached through SIGTERM."""

    point: str
    hit: int
    drain: bool = False
    before_drain: Callable[[], None] | None = None

    @property
    def name(self) -> str:
        return f"failpoint {self.point}@{self.hit}"

    def apply(self, cluster: Cluster) -> Proof:
        before = len(fired_failpoints(cluster.failpoint_log))
        cluster.start_engine(failpoints=f"{self.point}=kill@{self.hit}")
        engine = cluster.main.name
        pid = cluster.require_pid(engine)
        if self.drain:
            if self.before_drain is not None:
                self.before_drain()
            cluster.family.signal(pid, signal.SIGTERM)
        try:
            code = cluster.wait_exit(engine, FAILPOINT_TIMEOUT)
        except Timeout:
            cluster.family.signal(pid, signal.SIGKILL)
            cluster.wait_exit(engine, FOLLOW_TIMEOUT)
            return Proof(False, f"{self.name} was not reached in {FAILPOINT_TIMEOUT:g} s")
        lines = fired_failpoints(cluster.failpoint_log)[before:]
        fired = lines == [f"{self.point} kill {pid}"] and code == -signal.SIGKILL
        return Proof(fired, f"log: {lines}, engine {pid} ended with {code}")


@dataclass(frozen=True, slots=True)
class FlipBit:
    """One bit of one page in the pool file, while nobody runs. ``page``: a host page that an entry of the pool's table names."""

    page: int
    seed: int

    @property
    def name(self) -> str:
        return f"bit flip in host page {self.page}"

    def apply(self, cluster: Cluster) -> Proof:
        if left := cluster.family.living():
            return Proof(False, f"still running: {left}")
        path = cluster.main.data_dir / "pool.safetensors"
        begin, size = page_extent(path, self.page)
        bit = Random(self.seed).randrange(size * 8)
        with open(path, "r+b") as pool:
            before = os.pread(pool.fileno(), 1, begin + bit // 8)
            os.pwrite(pool.fileno(), bytes([before[0] ^ (1 << bit % 8)]), begin + bit // 8)
            after = os.pread(pool.fileno(), 1, begin + bit // 8)
        return Proof(before != after, f"bit {bit} of page {self.page}: byte {before.hex()} -> {after.hex()}")


def page_extent(path: Path, page: int) -> tuple[int, int]:
    """(offset in the file, bytes) of a host page, by the file's own header: any safetensors reader knows as much."""
    with open(path, "rb") as pool:
        header_size = int.from_bytes(pool.read(8), "little")
        header: dict[str, Any] = json.loads(pool.read(header_size))
    tensor = header["kv_pages"]
    begin, end = tensor["data_offsets"]
    size = (end - begin) // tensor["shape"][0]
    return 8 + header_size + begin + page * size, size
