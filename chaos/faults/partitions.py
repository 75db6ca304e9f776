"""Partitions: packets between two living processes vanish, of one direction or both, and neither is told."""

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass

from chaos.cluster import Cluster
from chaos.dump import Metrics
from chaos.faults.base import Proof
from chaos.faults.engines import overtaken
from chaos.netns import Link, cut, dropped
from chaos.place import Engine
from chaos.processes import wait_until

_FIRE_TIMEOUT = 30.0
_RUN_AHEAD_SECONDS = 1.0  #: the step in progress ends, and one more


@dataclass(frozen=True, slots=True)
class Ways:
    """Which direction is cut, seen from the side that connects."""

    text: str
    requests: bool
    replies: bool


WAYS = (Ways("no requests", True, False), Ways("no replies", False, True), Ways("nothing", True, True))


@dataclass(frozen=True, slots=True)
class Partition:
    """``seconds`` count from the first packet that was dropped."""

    link: Link
    ways: Ways
    seconds: float

    @property
    def name(self) -> str:
        return f"{self.link.name}: {self.ways.text} for {self.seconds:.1f} s"

    def apply(self, cluster: Cluster) -> Proof:
        with _cut(self.link, self.ways):
            time.sleep(self.seconds)
            packets = dropped()
        return Proof(sum(packets) > 0, f"packets dropped: {packets}")


@dataclass(frozen=True, slots=True)
class PartitionPastLease:
    """Between an engine and Redis, until the others have judged the engine dead.

    Meanwhile it must compute nothing that it cannot commit, though nobody told it anything; afterwards it must begin anew.
    """

    link: Link
    ways: Ways
    engine: Engine

    @property
    def name(self) -> str:
        return f"{self.link.name}: {self.ways.text} past the lease"

    def apply(self, cluster: Cluster) -> Proof:
        packets: tuple[int, ...] = ()
        steps: list[float] = []

        @contextlib.contextmanager
        def silent() -> Iterator[None]:
            nonlocal packets
            with _cut(self.link, self.ways):
                time.sleep(_RUN_AHEAD_SECONDS)
                steps.append(self._steps())
                yield
                steps.append(self._steps())
                packets = dropped()

        proof = overtaken(cluster, self.engine, silent())
        before, after = steps
        fired = proof.fired and sum(packets) > 0 and before == after
        return Proof(fired, f"packets dropped: {packets}; steps while cut off: {before:g} -> {after:g}; {proof.text}")

    def _steps(self) -> float:
        return Metrics.of(f"http://127.0.0.1:{self.engine.port}")["step_duration_seconds_count"]


@contextlib.contextmanager
def _cut(link: Link, ways: Ways) -> Iterator[None]:
    with cut(link, requests=ways.requests, replies=ways.replies):
        wait_until(lambda: sum(dropped()) > 0, _FIRE_TIMEOUT, f"a packet of {link.name}", pause=0.05)
        yield
