"""The disk of everything: its power goes, and what it did not have yet with it; or there is no room left on it."""

import errno
import os
import time
from dataclasses import dataclass
from pathlib import Path

from chaos.cluster import Cluster
from chaos.disk import LoopDisk
from chaos.faults.base import FOLLOW_TIMEOUT, Proof
from chaos.processes import wait_until


@dataclass(frozen=True, slots=True)
class PowerLoss:
    disk: LoopDisk
    spoils: tuple[str, ...]
    name: str = "power loss"

    def apply(self, cluster: Cluster) -> Proof:
        # Everybody stands still first. Cut under a running fdatasync, ext4 reported success and lost it (3 of 60 trials with a
        # plain file, 5 of 44 with a plain Valkey), which no honest disk does: there the answer comes after the write.
        with cluster.family.standstill():
            self.disk.cut_power()
            off = self.disk.is_off()
            pids = cluster.kill_all()
        self.disk.power_on()
        return Proof(off and not self.disk.is_off(), f"off: {off}; killed: {pids}; on again")


@dataclass(frozen=True, slots=True)
class FullDisk:
    """Not a byte is left. With ``appendfsync always`` Redis ends by itself then: what it acknowledged it has."""

    seconds: float
    name: str = "full disk"
    spoils: tuple[str, ...] = ()

    def apply(self, cluster: Cluster) -> Proof:
        redis, ballast = cluster.require_pid("redis"), cluster.main.data_dir / "ballast"
        try:
            taken = _fill(ballast)
            wait_until(lambda: cluster.pid("redis") != redis, FOLLOW_TIMEOUT, "the end of a Redis that cannot write")
            time.sleep(self.seconds)
        finally:
            ballast.unlink(missing_ok=True)
        new = cluster.wait_changed("redis", redis)
        return Proof(taken > 0, f"{taken >> 20} MiB taken; Redis {redis} ended, {new} took its place")


def _fill(path: Path) -> int:
    """Bytes that were left, now in ``path``."""
    fd, size, piece = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o600), 0, 64 << 20
    try:
        while piece >= 4096:
            try:
                os.posix_fallocate(fd, size, piece)
                size += piece
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
                piece //= 2
    finally:
        os.close(fd)
    return size
