"""Clocks that somebody sets while everything runs."""

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from email.utils import parsedate_to_datetime

import httpx
import redis

from chaos.clock import Clock
from chaos.cluster import Cluster
from chaos.faults.base import Proof
from chaos.processes import wait_until

_SHOW_TIMEOUT = 10.0
_PRECISION = 5.0  #: seconds: an HTTP date has whole ones, and is made once a second


@dataclass(frozen=True, slots=True)
class Watch:
    """A process's clock, and where that process shows what time it believes it is."""

    process: str
    clock: Clock
    shows: Callable[[], float]


@dataclass(frozen=True, slots=True)
class ClockStep:
    watches: Sequence[Watch]
    seconds: int  #: ahead of the true time

    @property
    def name(self) -> str:
        return f"clock of {', '.join(watch.process for watch in self.watches)} put to {self.seconds:+d} s"

    def apply(self, cluster: Cluster) -> Proof:
        before = self._ahead()
        for watch in self.watches:
            watch.clock.put(self.seconds)
        wait_until(lambda: all(abs(ahead - self.seconds) < _PRECISION for ahead in self._ahead()), _SHOW_TIMEOUT, self.name, 0.1)
        return Proof(True, f"they were {before} s ahead of us, and are {self._ahead()}")

    def _ahead(self) -> list[int]:
        return [round(watch.shows() - time.time()) for watch in self.watches]


def time_of_redis(cluster: Cluster) -> float:
    with contextlib.closing(redis.Redis.from_url(cluster.redis_url, socket_timeout=5.0)) as client:
        seconds, microseconds = client.time()
        return float(seconds + microseconds / 1e6)


def time_of_server(url: str) -> float:
    """By the date that it puts on its answers."""
    return parsedate_to_datetime(httpx.get(f"{url}/livez", timeout=5.0, trust_env=False).headers["Date"]).timestamp()
