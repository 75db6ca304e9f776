"""What a Redis that lives may answer besides OK: each for a moment, then as before. Told to it over a connection of our own."""

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import redis

from chaos.cluster import Cluster
from chaos.faults.base import Proof

_MOOD_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class Mood:
    """``begin`` and ``end`` are given a connection; ``holds`` says whether Redis is in that mood, while it lasts."""

    name: str
    begin: Callable[[Any], object]
    end: Callable[[Any], object]
    holds: Callable[[Any], bool]
    seconds: float = _MOOD_SECONDS

    def apply(self, cluster: Cluster) -> Proof:
        with _admin(cluster) as admin:
            self.begin(admin)
            held = self.holds(admin)
            time.sleep(self.seconds)
            self.end(admin)
            return Proof(held and not self.holds(admin), f"{self.name} for {self.seconds:g} s")


@contextlib.contextmanager
def _admin(cluster: Cluster) -> Iterator[Any]:
    with contextlib.closing(redis.Redis.from_url(cluster.redis_url, decode_responses=True, socket_timeout=30.0)) as admin:
        yield admin


@dataclass(frozen=True, slots=True)
class Once:
    """One command that takes something away from everybody."""

    name: str
    take: Callable[[Any], object]

    def apply(self, cluster: Cluster) -> Proof:
        with _admin(cluster) as admin:
            return Proof(True, f"answered {self.take(admin)}")


def _use(admin: Any) -> int:
    return int(admin.info("memory")["used_memory"])


MOODS: tuple[Mood | Once, ...] = (
    Once("SCRIPT FLUSH", lambda admin: admin.script_flush()),
    Once("CLIENT KILL of all", lambda admin: admin.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")),
    Mood(
        "no memory left",
        lambda admin: admin.config_set("maxmemory", _use(admin) // 2),
        lambda admin: admin.config_set("maxmemory", 256 << 20),
        lambda admin: int(admin.config_get("maxmemory")["maxmemory"]) < _use(admin),
    ),
    Mood(
        "read-only replica",
        lambda admin: admin.replicaof("127.0.0.1", 1),
        lambda admin: admin.replicaof("NO", "ONE"),
        lambda admin: admin.role()[0] != "master",
    ),
    Mood(
        "writes paused",
        lambda admin: admin.execute_command("CLIENT", "PAUSE", "60000", "WRITE"),
        lambda admin: admin.execute_command("CLIENT", "UNPAUSE"),
        lambda admin: admin.info("clients")["paused_reason"] != "none",
        6.0,
    ),
)
