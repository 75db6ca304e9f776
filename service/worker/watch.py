"""What an engine does for the others: it takes over the jobs of those that died, and ends jobs whose deadline passed."""

from collections.abc import Callable

import structlog

from service.lease import EngineWatcher, boot_time
from storage.errors import StoreUnavailable, WrongStore
from storage.job_store import JobStore
from storage.records import EngineRecord

log = structlog.get_logger("midsentence.engine")


class Watch:
    """On a connection of its own. ``on_change``: there may be a job to claim, or one less to compute."""

    def __init__(
        self,
        store: JobStore,
        engine_id: str,
        lease: float,
        *,
        on_change: Callable[[], None],
        clock: Callable[[], float] = boot_time,
    ) -> None:
        self._store = store
        self._engine_id = engine_id
        self._watcher = EngineWatcher(lease)
        self._on_change = on_change
        self._clock = clock

    def look(self) -> None:
        try:
            now = self._clock()
            others = [record for record in self._store.engines() if record.info.engine_id != self._engine_id]
            for dead in self._watcher.dead(now, others):
                self._take_over(dead)
            if self._store.sweep_deadlines():
                self._on_change()
        except (StoreUnavailable, WrongStore):
            self._watcher.restart()

    def _take_over(self, dead: EngineRecord) -> None:
        moved = 0
        while count := self._store.take_over(dead.info.engine_id, dead.incarnation, dead.beat):
            moved += count
        log.warning("engine_taken_over", engine_id=dead.info.engine_id, host=dead.info.host, jobs=moved)
        self._on_change()
