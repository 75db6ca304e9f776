"""Who is dead (PROTOCOL.md 3): a pure judge of what one watcher saw. No TTL, no wall clock, no I/O.

After a Redis outage longer than a TTL every living engine looked dead, and a clock step did the same. So an engine is dead only
when this watcher saw its (incarnation, beat) unchanged for a lease, on its own CLOCK_BOOTTIME, over reads that all succeeded. An
api is judged by the same rule, with a longer lease.
"""

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from storage.records import EngineRecord

BEATS = 6  #: and looks that fit into a lease


def pace(lease: float) -> float:
    """Seconds between two beats of an engine, and between two looks of a watcher: once a second, more often for short leases.

    At once a second a lease of 3 s was never over: each gap was more than the third of it that a watch may be interrupted for.
    """
    return min(1.0, lease / BEATS)


def boot_time() -> float:
    """Seconds since the machine started, counting sleep; no one can set it."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


@dataclass(slots=True)
class _Watched:
    pair: tuple[str, int]  #: incarnation, beat
    since: float  #: when this watch of the pair began
    moved: bool  #: the pair was seen to change (or to appear) between two reads


class LeaseWatcher:
    """Feed it each successful read of who beats; it answers with those that stood still for a lease."""

    def __init__(self, lease: float) -> None:
        self._lease = lease
        self._watched: dict[str, _Watched] = {}
        self._last_read: float | None = None

    def restart(self) -> None:
        """Forget how long anybody stood still: a read failed, so nobody can be blamed for the time before."""
        self._last_read = None

    def observe(self, now: float, beats: Mapping[str, tuple[str, int]]) -> list[str]:
        """``now`` is ``boot_time()`` at the read of ``beats``: id -> (incarnation, beat). Answers with ids.

        A Redis that was started again between two reads needs no word of its own: nobody could beat while it was away, which was
        no longer than the gap between the reads.
        """
        continuous = (
            self._last_read is not None
            and now - self._last_read <= self._lease / 3  # a gap in our own reads is no evidence against others
        )
        first = self._last_read is None and not self._watched
        self._last_read = now
        watched: dict[str, _Watched] = {}
        for one, pair in beats.items():
            before = self._watched.get(one)
            if before is None or before.pair != pair:
                watched[one] = _Watched(pair, now, moved=not first)
            elif not continuous:
                watched[one] = _Watched(pair, now, before.moved)
            else:
                watched[one] = before
        self._watched = watched
        return [one for one, seen in watched.items() if now - seen.since >= self._lease]

    def living(self, now: float) -> frozenset[str]:
        """Ids of those that were seen to move within a lease before ``now``: proof of life, not mere absence of a death."""
        return frozenset(one for one, watched in self._watched.items() if watched.moved and now - watched.since < self._lease)


class EngineWatcher(LeaseWatcher):
    """The same for engines, whose death is written into their records."""

    def dead(self, now: float, records: Iterable[EngineRecord]) -> list[EngineRecord]:
        """The records to be taken over: unchanged for a lease, or marked dead by somebody who did not come to move all its jobs."""
        seen = {record.info.engine_id: record for record in records}
        still = self.observe(now, {i: (record.incarnation, record.beat) for i, record in seen.items() if not record.dead})
        return [record for i, record in seen.items() if i in still or (record.dead and record.job_ids)]
