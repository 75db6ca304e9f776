"""An engine that is not heard of for longer than its lease, and then goes on as if nothing had happened."""

import contextlib
import signal
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass

from chaos.cluster import Cluster
from chaos.dump import reading
from chaos.faults.base import FAILPOINT_TIMEOUT, FOLLOW_TIMEOUT, Proof
from chaos.place import Engine, fired_failpoints
from chaos.processes import is_stopped, wait_until
from storage.records import EngineRecord

_TAKE_OVER_TIMEOUT = 60.0


@dataclass(frozen=True, slots=True)
class Overtake:
    """SIGSTOP at this moment; another engine declares it dead and takes its jobs; SIGCONT; it must begin anew."""

    engine: Engine

    @property
    def name(self) -> str:
        return f"SIGSTOP {self.engine.name} past its lease"

    def apply(self, cluster: Cluster) -> Proof:
        return overtaken(cluster, self.engine, _stopped(cluster, self.engine))


@dataclass(frozen=True, slots=True)
class OvertakeAtPoint:
    """A life of an engine that stops itself at a named point; afterwards it is killed, and lives on without a point."""

    engine: Engine
    point: str
    hit: int

    @property
    def name(self) -> str:
        return f"{self.engine.name} stopped at {self.point}@{self.hit} past its lease"

    def apply(self, cluster: Cluster) -> Proof:
        self._again(cluster, f"{self.point}=stop@{self.hit}")
        before = len(fired_failpoints(cluster.failpoint_log))
        pid = cluster.require_pid(self.engine.name)
        wait_until(lambda: is_stopped(pid), FAILPOINT_TIMEOUT, self.name, pause=0.05)
        proof = overtaken(cluster, self.engine, _stopped(cluster, self.engine))
        lines = fired_failpoints(cluster.failpoint_log)[before - 1 :]
        self._again(cluster, "")
        return Proof(proof.fired, f"{proof.text}; log: {lines}")

    def _again(self, cluster: Cluster, failpoints: str) -> None:
        pid = cluster.signal(self.engine.name, signal.SIGKILL)
        wait_until(lambda: cluster.family.gone(pid), FOLLOW_TIMEOUT, f"the end of {self.engine.name}")
        cluster.start_engine(self.engine, failpoints)
        pid = cluster.require_pid(self.engine.name)
        wait_until(
            lambda: any(record.info.pid == pid for record in _records(cluster)), FAILPOINT_TIMEOUT, f"{self.engine.name} registers"
        )


def overtaken(cluster: Cluster, engine: Engine, silent: AbstractContextManager[object]) -> Proof:
    """``silent`` while it lasts: wait for the judgement, let the engine go on, wait for its new incarnation."""
    pid = cluster.require_pid(engine.name)
    before = _record(cluster, pid)

    def record() -> EngineRecord:
        return next(record for record in _records(cluster) if record.info.engine_id == before.info.engine_id)

    with silent:
        wait_until(lambda: record().dead, _TAKE_OVER_TIMEOUT, f"{engine.name} is declared dead", pause=0.1)
        jobs = record().job_ids
    wait_until(lambda: not record().dead, _TAKE_OVER_TIMEOUT, f"{engine.name} registers anew", pause=0.05)
    after = record().incarnation
    fired = not jobs and after != before.incarnation and cluster.pid(engine.name) == pid
    return Proof(fired, f"{engine.name} {pid} was {before.incarnation}, is {after}; jobs left to the dead: {len(jobs)}")


@contextlib.contextmanager
def _stopped(cluster: Cluster, engine: Engine) -> Iterator[None]:
    """Also for one that stopped itself."""
    pid = cluster.signal(engine.name, signal.SIGSTOP)
    try:
        yield
    finally:
        cluster.family.signal(pid, signal.SIGCONT)


def _record(cluster: Cluster, pid: int) -> EngineRecord:
    return next(record for record in _records(cluster) if record.info.pid == pid)


def _records(cluster: Cluster) -> list[EngineRecord]:
    with reading(cluster.redis_url) as store:
        return store.engines()
