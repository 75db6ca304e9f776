"""Who is dead (PROTOCOL.md 3): a pure judge of what one watcher saw. No TTL, no wall clock, no I/O.

After a Redis outage longer than a TTL every living engine looked dead, and a clock step did the same. So an engine is dead only
when this watcher saw its (incarnation, beat) unchanged for a lease, on its own CLOCK_BOOTTIME, over reads that all succeeded.
"""

import time
from collections.abc import Hashable, Iterable
from dataclasses import dataclass

from storage.records import EngineRecord


def boot_time() -> float:
    """Seconds since the machine started, counting sleep; no one can set it."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


@dataclass(slots=True)
class _Watched:
    pair: tuple[str, int]  #: incarnation, beat
    since: float  #: when this watch of the pair began
    moved: bool  #: the pair was seen to change (or to appear) between two reads


class LeaseWatcher:
    """Feed it each successful read of the engine records; it answers with those that are dead by now."""

    def __init__(self, lease: float) -> None:
        self._lease = lease
        self._engines: dict[str, _Watched] = {}
        self._last_read: float | None = None
        self._generation: Hashable = None

    def restart(self) -> None:
        """Forget how long anybody stood still: a read failed, so nobody can be blamed for the time before."""
        self._last_read = None

    def observe(self, now: float, records: Iterable[EngineRecord], generation: Hashable = None) -> list[EngineRecord]:
        """``now`` is ``boot_time()`` at the read; ``generation`` changes with every reconnect and every new Redis run id.

        Answers with the records to be taken over: unchanged for a lease, and not marked dead by somebody else.
        """
        continuous = (
            self._last_read is not None
            and generation == self._generation
            and now - self._last_read <= self._lease / 3  # a gap in our own reads is no evidence against others
        )
        first = self._last_read is None and not self._engines
        self._last_read, self._generation = now, generation
        watched: dict[str, _Watched] = {}
        dead = []
        for record in records:
            engine_id, pair = record.info.engine_id, (record.incarnation, record.beat)
            before = self._engines.get(engine_id)
            if record.dead:
                continue
            if before is None or before.pair != pair:
                watched[engine_id] = _Watched(pair, now, moved=not first)
            elif not continuous:
                watched[engine_id] = _Watched(pair, now, before.moved)
            else:
                watched[engine_id] = before
                if now - before.since >= self._lease:
                    dead.append(record)
        self._engines = watched
        return dead

    def living(self, now: float) -> frozenset[str]:
        """Ids of engines that were seen to move within a lease before ``now``: proof of life, not mere absence of a death."""
        return frozenset(
            engine_id for engine_id, watched in self._engines.items() if watched.moved and now - watched.since < self._lease
        )
