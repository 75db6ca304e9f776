"""Damage to files, done while nobody runs: bits that flip, pages that lie in each other's place, copies put back."""

import json
import os
import shutil
import signal
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from chaos.cluster import Cluster
from chaos.faults.base import Proof


@dataclass(frozen=True, slots=True)
class FlipBit:
    """One bit of one page in the pool file, while nobody runs. ``page``: a host page that an entry of the pool's table names."""

    page: int
    seed: int

    @property
    def name(self) -> str:
        return f"bit flip in host page {self.page}"

    @property
    def spoils(self) -> tuple[str, ...]:
        return (f"host page {self.page}",)

    def apply(self, cluster: Cluster) -> Proof:
        if left := cluster.family.living():
            return Proof(False, f"still running: {left}")
        path = cluster.main.data_dir / "pool.safetensors"
        begin, size = page_extent(path, self.page)
        bit = Random(self.seed).randrange(size * 8)
        with open(path, "r+b") as pool:
            before = os.pread(pool.fileno(), 1, begin + bit // 8)
            os.pwrite(pool.fileno(), bytes([before[0] ^ (1 << bit % 8)]), begin + bit // 8)
            after = os.pread(pool.fileno(), 1, begin + bit // 8)
        return Proof(before != after, f"bit {bit} of page {self.page}: byte {before.hex()} -> {after.hex()}")


def page_extent(path: Path, page: int) -> tuple[int, int]:
    """(offset in the file, bytes) of a host page, by the file's own header: any safetensors reader knows as much."""
    with open(path, "rb") as pool:
        header_size = int.from_bytes(pool.read(8), "little")
        header: dict[str, Any] = json.loads(pool.read(header_size))
    tensor = header["kv_pages"]
    begin, end = tensor["data_offsets"]
    size = (end - begin) // tensor["shape"][0]
    return 8 + header_size + begin + page * size, size


@dataclass(frozen=True, slots=True)
class SwapPages:
    """Two whole pages of the pool change places: each is what somebody wrote, and neither is what its entry names."""

    first: int
    second: int

    @property
    def name(self) -> str:
        return f"host pages {self.first} and {self.second} swapped"

    @property
    def spoils(self) -> tuple[str, ...]:
        return (f"host page {self.first}", f"host page {self.second}")

    def apply(self, cluster: Cluster) -> Proof:
        if left := cluster.family.living():
            return Proof(False, f"still running: {left}")
        path = cluster.main.data_dir / "pool.safetensors"
        (a, size), (b, _) = page_extent(path, self.first), page_extent(path, self.second)
        with open(path, "r+b") as pool:
            one, other = os.pread(pool.fileno(), size, a), os.pread(pool.fileno(), size, b)
            os.pwrite(pool.fileno(), other, a)
            os.pwrite(pool.fileno(), one, b)
        return Proof(one != other, f"{size} bytes each, {'different' if one != other else 'equal'}")


@dataclass(frozen=True, slots=True)
class PutBack:
    """A file or directory is replaced by the copy that was taken of it earlier, as an operator or a snapshot does it."""

    what: Path
    copy: Path
    spoils: tuple[str, ...] = ("*",)

    @property
    def name(self) -> str:
        return f"{self.what.name} put back from a copy"

    def apply(self, cluster: Cluster) -> Proof:
        if left := cluster.family.living():
            return Proof(False, f"still running: {left}")
        if self.what.is_dir():
            shutil.rmtree(self.what)
        copy_of(self.copy, self.what)
        return Proof(self.what.exists(), f"{self.copy} over {self.what}")


@dataclass(frozen=True, slots=True)
class ExternalRedisPutBack:
    """Redis alone dies, and comes back as it was when the copy was taken; engine and api live meanwhile."""

    copy: Path
    name = "external Redis put back from a copy"
    spoils: tuple[str, ...] = ("*",)

    def apply(self, cluster: Cluster) -> Proof:
        redis = cluster.signal("redis", signal.SIGKILL)
        cluster.wait_exit("redis", 10.0)
        shutil.rmtree(cluster.redis_dir)
        copy_of(self.copy, cluster.redis_dir)
        cluster.start_redis()
        return Proof(cluster.pid("redis") != redis, f"{self.copy} over {cluster.redis_dir}")


def copy_of(source: Path, target: Path) -> Path:
    """A copy of a file or directory, sockets left out; taken while the service writes, as a snapshot is."""
    if source.is_dir():
        shutil.copytree(source, target, ignore=lambda folder, names: [n for n in names if (Path(folder) / n).is_socket()])
    else:
        shutil.copy2(source, target)
    return target
