"""What every api does once a second, in a thread of its own: end what is overdue, purge what is old, take over from dead engines,
end what dead apis served.

Purged is gone from what Redis answers at once; from its file with the next rewrite, which is asked for here.

Any number of apis may do this at once: each verb is one script that looks again before it writes.
"""

import threading
import time
from collections.abc import Callable

from service.api.context import Context, StoreView
from service.api.plain_jobs import PlainJobs
from service.lease import EngineWatcher, boot_time, pace
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
        self._watcher = EngineWatcher(context.options.lease_seconds)
        self._plain_jobs = PlainJobs(context)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="background", daemon=True)
        self._said: dict[str, tuple[str, float]] = {}  #: chore -> event and when

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """A call in flight may take its whole time-out; the thread is a daemon, and nothing depends on its end."""
        self._stopping.set()

    def _run(self) -> None:
        options = self._context.options
        interval = min(options.sweep_interval, pace(options.lease_seconds), pace(options.api_lease_seconds))
        while not self._stopping.is_set():
            try:
                self.sweep()
            except Exception:
                _log.exception("sweep_failed")
            self._stopping.wait(interval)

    def sweep(self) -> None:
        """One round. Publishes ``context.view``, which the probes and the limits of new jobs read."""
        at = time.monotonic()
        try:
            self._context.store.run_here(self._look)
        except StorageError as error:
            self._watcher.restart()
            self._plain_jobs.restart()
            self._context.timeline.could_not_look()
            self._context.view = StoreView(at, error, engines=self._context.view.engines if self._context.view else ())
            self._say_once("look", "store_refused" if not isinstance(error, StoreUnavailable) else "store_away", error)
            return
        self._said.pop("look", None)
        for name, chore in self._chores():
            try:
                self._context.store.run_here(chore)
            except (StoreUnavailable, StoreFull, WrongStore):
                return  # the next look says so
            except StorageError as error:
                self._say_once(name, "sweep_refused", error)
            else:
                self._said.pop(name, None)

    def _chores(self) -> tuple[tuple[str, Callable[[JobStore], None]], ...]:
        return (
            ("plain_jobs", self._plain_jobs.look),
            ("deadlines", self._end_overdue),
            ("purge", self._purge),
            ("purge_batches", self._purge_batches),
            ("purge_files", self._purge_files),
            ("rewrite", self._rewrite_file),
        )

    def _look(self, store: JobStore) -> None:
        now = boot_time()
        engines = tuple(store.engines())
        dead = self._watcher.dead(now, engines)
        counts = store.counts()
        for status, count in counts.items():
            self._context.metrics.jobs.labels(status.value).set(count)
        for batch_status, count in store.batches.counts().items():
            self._context.metrics.batches.labels(batch_status.value).set(count)
        self._context.view = StoreView(time.monotonic(), None, engines, self._watcher.living(now), counts)
        self._context.timeline.looked(engines)
        for engine in dead:
            self._take_over(store, engine)

    def _take_over(self, store: JobStore, engine: EngineRecord) -> None:
        moved = 0
        while count := store.take_over(engine.info.engine_id, engine.incarnation, engine.beat):
            moved += count
        self._context.metrics.engines_taken_over.inc()
        self._context.timeline.taken_over(engine.info.engine_id, moved)
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

    def _purge_batches(self, store: JobStore) -> None:
        options = self._context.options
        purged = store.batches.sweep_batches(options.retention_seconds, limit=options.max_purges)
        if purged:
            self._context.metrics.jobs_purged.inc(purged)
            _log.info("batch_jobs_purged", count=purged)

    def _purge_files(self, store: JobStore) -> None:
        if removed := store.batches.sweep_files(self._context.options.retention_seconds):
            _log.info("files_purged", count=removed)

    def _rewrite_file(self, store: JobStore) -> None:
        if store.rewrite_file(self._context.options.rewrite_interval):
            _log.info("append_only_file_rewrite_begun")

    def _say_once(self, chore: str, event: str, error: StorageError) -> None:
        """Until the chore goes well again, the same event of it is said once a minute."""
        now = time.monotonic()
        said, at = self._said.get(chore, ("", 0.0))
        if event != said or now - at >= _SAY_AGAIN:
            self._said[chore] = event, now
            _log.warning(event, error=str(error))
