"""A machine, as far as it outlives the processes on it."""

from pathlib import Path

from storage.errors import StorageError
from tests.simulation.disk import SimDisk, untroubled
from tests.simulation.hash_model import PAGE_BYTES
from tests.simulation.life import Killed, Life


class Host:
    """What outlives a process: the data directory, the machine's boot, how its engine is configured."""

    def __init__(self, world, name: str, folder: Path) -> None:
        rng = world.rng
        self.world, self.name, self.folder = world, name, folder
        folder.mkdir(parents=True, exist_ok=True)
        self.path.unlink(missing_ok=True)
        self.disk = SimDisk(rng)
        self.boot, self.mark, self.pool_id = 0, 0, ""
        self.life: Life | None = None
        self.stopped_until = 0.0
        self.host_pages = rng.choice((0, 6, 10, 16, 32)) if rng.random() < 0.9 else 3
        self.durable_pages = rng.random() < 0.5  #: ``--durability machine``
        self.may_be_damaged = False  #: power was lost while pages waited for the disk
        self.entries_doubtful = False  #: see ``hears_itself_late``

    @property
    def path(self) -> Path:
        return self.folder / "pool.safetensors"

    def start(self) -> None:
        if self.life is not None:
            return
        if not self.world.redis.up:
            self.restart()
            return
        try:
            self.life = Life(self)
        except (StorageError, Killed) as error:  # the supervisor tries again
            self.disk.before = untroubled
            self.world.note(self.name, "start failed", type(error).__name__)
            self.restart()

    def lose_power(self) -> None:
        self.boot += 1
        if self.path.exists():
            self.world.count("sectors lost", self.disk.lose_power(self.path))
            self.may_be_damaged |= not self.durable_pages

    def read_page(self, page: int) -> bytes:
        offset = self.path.stat().st_size - (self.host_pages - page) * PAGE_BYTES
        with self.path.open("rb") as file:
            file.seek(offset)
            return file.read(PAGE_BYTES)

    @property
    def incarnation(self) -> str:
        return "" if self.life is None else self.life.loop.identity.incarnation

    def hears_itself_late(self, incarnation: str) -> None:
        """An old request of the living engine comes after newer ones of its own. What it publishes may be dropped and written over
        since, and nothing tells Redis so: from here on the checksum alone says which entries are true."""
        self.entries_doubtful |= self.incarnation == incarnation

    def restart(self) -> None:
        self.world.after(self.world.rng.uniform(0.05, 0.8), f"{self.name}: start", self.start)
