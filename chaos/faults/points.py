"""Named points inside the product's processes: where they die, stop, or meet a bad disk."""

import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from chaos.cluster import Cluster
from chaos.faults.base import FAILPOINT_TIMEOUT, FOLLOW_TIMEOUT, Proof
from chaos.place import fired_failpoints
from chaos.processes import Timeout, wait_until


@dataclass(frozen=True, slots=True)
class Failpoint:
    """The engine kills itself at a named point, at its n-th hit in this life. Points of the drain are reached through SIGTERM."""

    point: str
    hit: int
    drain: bool = False
    before_drain: Callable[[], None] | None = None
    settings: Mapping[str, str] = field(default_factory=dict)  #: of this life

    @property
    def name(self) -> str:
        return f"failpoint {self.point}@{self.hit}"

    def apply(self, cluster: Cluster) -> Proof:
        before = len(fired_failpoints(cluster.failpoint_log))
        cluster.start_engine(failpoints=f"{self.point}=kill@{self.hit}", settings=self.settings)
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
class ApiFailpoint:
    """A life of the api that ends by itself at a named point. Nobody starts the next one here."""

    point: str
    hit: int

    @property
    def name(self) -> str:
        return f"failpoint {self.point}@{self.hit}"

    def apply(self, cluster: Cluster) -> Proof:
        before = len(fired_failpoints(cluster.failpoint_log))
        if cluster.pid("api") is not None:
            cluster.stop_role("api")
        cluster.start_api(failpoints=f"{self.point}=kill@{self.hit}")
        pid = cluster.require_pid("api")
        code = cluster.wait_exit("api", FAILPOINT_TIMEOUT)
        lines = fired_failpoints(cluster.failpoint_log)[before:]
        return Proof(lines == [f"{self.point} kill {pid}"], f"log: {lines}, api {pid} ended with {code}")


@dataclass(frozen=True, slots=True)
class EngineError:
    """A life of the engine in which one call to the disk fails: ``point=action`` at its n-th hit. It must live on."""

    point: str
    hit: int

    @property
    def name(self) -> str:
        return f"{self.point}@{self.hit}"

    def apply(self, cluster: Cluster) -> Proof:
        before = len(fired_failpoints(cluster.failpoint_log))
        cluster.start_engine(failpoints=self.name)
        engine = cluster.main.name
        pid = cluster.require_pid(engine)
        wait_until(lambda: len(fired_failpoints(cluster.failpoint_log)) > before, FAILPOINT_TIMEOUT, self.name, pause=0.05)
        time.sleep(1.0)  # what kills it would have killed it by now
        lines = fired_failpoints(cluster.failpoint_log)[before:]
        return Proof(cluster.pid(engine) == pid, f"log: {lines}, engine {pid} {'lives' if cluster.pid(engine) == pid else 'died'}")
