"""What a fault is: done to the service from outside, with the proof that it happened. One that did not fire is a failed run."""

from dataclasses import dataclass
from typing import Protocol

from chaos.cluster import Cluster
from chaos.history import FaultRecord, History, now
from chaos.processes import Timeout

#: Death by the parent's death: the kernel tells at once, a busy machine takes its time.
FOLLOW_TIMEOUT = 5.0
#: An orderly end takes at most this long (the drain), and a little more on a loaded machine.
DRAIN_TIMEOUT = 25.0
#: Some points are rare: two jobs of one prompt must be claimed together for a copy on write.
FAILPOINT_TIMEOUT = 180.0


@dataclass(frozen=True, slots=True)
class Proof:
    fired: bool
    text: str


class Fault(Protocol):
    """One that damages pages names them in ``spoils`` (``FaultRecord``)."""

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
    history.add(FaultRecord(fault.name, started, now(), proof.fired, proof.text, getattr(fault, "spoils", ())))
    return proof
