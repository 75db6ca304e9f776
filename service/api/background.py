"""What every api does once a second, in a thread of its own: end what is overdue, purge what is old, take over from dead engines.

Any number of apis may do this at once: each verb is one script that looks again before it writes.
"""

import threading
import time

from service.api.context import Context, StoreView
from service.lease import LeaseWatcher, boot_time
from service.logs import get_logger
from storage.errors import StorageError, StoreFull, StoreUnavailable, WrongStore
from storage.job_store import JobStore
from storage.records import EngineRecord

#: A refusal that needs a person is said again this often, in seconds.
_SAY_AGAIN = 60.0
_log = get_logger("api.background")


class Background:
    def __init__(self, context: Context) -> None:
        self._context = context
        self._watcher = LeaseWatcher(context.options.lease_seconds)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="background", daemon=True)
        self._said: dict[str, float] = {}

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """A call in flight may take its whole time-out; the thread is a daemon, and nothing depends on its end."""
        self._stopping.set()

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                self.sweep()
            except Exception:
                _log.exception("sweep_failed")
            self._stopping.wait(self._context.options.sweep_interval)

    def sweep(self) -> None:
        """One round. Publishes ``context.view``, which the probes and the limits of new jobs read."""
        at = time.monotonic()
        try:
            self._context.store.run_here(self._look)
        except StorageError as error:
            self._watcher.restart()
            self._context.view = StoreView(at, error, engines=self._context.view.engines if self._context.view else ())
            self._say_once("store_refused" if not isinstance(error, StoreUnavailable) else "store_away", error)
            return
        self._said.clear()
        for chore in (self._end_overdue, self._purge):
            try:
                self._context.store.run_here(chore)
            except (StoreUnavailable, StoreFull, WrongStore):
                return  # the next look says so
            except StorageError as error:
                self._say_once("sweep_refused", error)

    def _look(self, store: JobStore) -> None:
        now = boot_time()
        engines = tuple(store.engines())
        dead = self._watcher.observe(now, engines)
        counts = store.counts()
        for status, count in counts.items():
            self._context.metrics.jobs.labels(status.value).set(count)
        self._context.view = StoreView(time.monotonic(), None, engines, self._watcher.living(now), counts)
        for engine in dead:
            self._take_over(store, engine)

    def _take_over(self, store: JobStore, engine: EngineRecord) -> None:
        moved = 0
        while count := store.take_over(engine.info.engine_id, engine.incarnation, engine.beat):
            moved += count
        self._context.metrics.engines_taken_over.inc()
        _log.warning("engine_taken_over", engine_id=engine.info.engine_id, host=engine.info.host, jobs=moved)

    def _end_overdue(self, store: JobStore) -> None:
        while ended := store.sweep_deadlines():
            _log.info("deadlines_passed", jobs=list(ended))

    def _purge(self, store: JobStore) -> None:
        options = self._context.options
        purged = store.sweep_expired(options.retention_seconds, limit=options.max_purges)
        if purged:
            self._context.metrics.jobs_purged.inc(purged)
            _log.info("jobs_purged", count=purged)

    def _say_once(self, event: str, error: StorageError) -> None:
        now = time.monotonic()
        if now - self._said.get(event, -_SAY_AGAIN) >= _SAY_AGAIN:
            self._said[event] = now
            _log.warning(event, error=str(error))
