"""The kernel kills the engine for want of memory, in a control group that the whole service lives in."""

import re
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

from chaos.cluster import START_TIMEOUT, Cluster
from chaos.faults.base import FOLLOW_TIMEOUT, Proof
from chaos.memory import MemoryGroup
from chaos.processes import wait_until

_ROOM = 16 << 20  #: left to the group, and taken by somebody
_KILL_TIMEOUT = 30.0  #: what the kernel can take back it takes back first: pages of files
#: While the engine dies its memory is still in use, and the kernel may look for somebody else: the eater, then, not the api.
_NEXT = "\necho 999 > /proc/$$/oom_score_adj"
#: Takes as much memory as there is, a little at a time.
_EATER = "import time; eaten = []\nwhile True: eaten.append(b'x' * (1 << 20)); time.sleep(0.002)"


@dataclass(frozen=True, slots=True)
class OutOfMemory:
    group: MemoryGroup
    name: str = "engine killed by the kernel for want of memory"

    def apply(self, cluster: Cluster) -> Proof:
        engine, before, lives = cluster.require_pid("engine"), self.group.oom_kills, len(_lives(cluster))
        Path(f"/proc/{engine}/oom_score_adj").write_text("1000")  # it is the largest; this says so even if the eater grows past it
        self.group.limit(self.group.in_use + _ROOM)
        eater = cluster.start_beside("eater", [sys.executable, "-c", _EATER], self.group.prelude + _NEXT)
        try:
            wait_until(lambda: cluster.family.gone(engine), _KILL_TIMEOUT, f"the kernel kills engine {engine}")
        finally:
            self.group.limit(None)
            cluster.family.signal(eater, signal.SIGKILL)
        wait_until(lambda: cluster.family.gone(eater), FOLLOW_TIMEOUT, "the end of what took the memory")
        kills = self.group.oom_kills - before
        cluster.wait_changed("engine", engine)
        wait_until(lambda: len(_lives(cluster)) > lives, START_TIMEOUT, "the registration of the next engine")
        told = _lives(cluster)[-1]
        fired = kills >= 1 and told == "crash"
        return Proof(fired, f"the group counts {kills} more; engine {engine} is dead, and the next one was told of a {told}")


def _lives(cluster: Cluster) -> list[str]:
    """How the life before had ended, as the supervisor told each engine, by what it logged when it registered."""
    events = re.findall(
        r'^{.*"event": "registered", .*"last_exit": "(\w+)"', (cluster.logs / "serve.log").read_text(), re.MULTILINE
    )
    return list(map(str, events))
