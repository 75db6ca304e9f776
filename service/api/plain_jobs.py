"""Jobs that end with the api that serves them (PROTOCOL.md 3): this one beats while it has any, and ends those of the dead."""

from service.api.context import Context
from service.api.openai.response_jobs import is_unstored
from service.lease import BEATS, LeaseWatcher, boot_time
from service.logs import get_logger
from storage.errors import StorageError
from storage.job_store import JobStore
from storage.records import ApiRecord

_log = get_logger("api.plain_jobs")


class PlainJobs:
    """Any number of apis may look at once, and each may end the same jobs."""

    def __init__(self, context: Context) -> None:
        self._own = context.incarnation
        self._lease = context.options.api_lease_seconds
        self._watcher = LeaseWatcher(self._lease)
        self._beat_at: float | None = None

    def restart(self) -> None:
        """The store was away: nobody could beat."""
        self._watcher.restart()

    def look(self, store: JobStore) -> None:
        """Raises what ``storage.errors`` names: a store that takes no writes takes no beats either."""
        try:
            self._look(store)
        except StorageError:
            self.restart()
            raise

    def _look(self, store: JobStore) -> None:
        now = boot_time()
        apis = {api.incarnation: api for api in store.apis()}
        still = self._watcher.observe(now, {incarnation: (incarnation, api.beat) for incarnation, api in apis.items()})
        if self._own in apis and (self._beat_at is None or now - self._beat_at >= self._lease / BEATS):
            store.beat(self._own)
            self._beat_at = now
        for incarnation in still:
            if incarnation != self._own:
                _end(store, apis[incarnation])


def _end(store: JobStore, api: ApiRecord) -> None:
    """No compare and set: all these jobs were submitted before the lease began, and an api that comes back now is not wronged by
    more than it was when it was judged. Its clients are told that their jobs were cancelled."""
    for job_id in api.job_ids:
        record = store.get(job_id)
        if record is not None and is_unstored(record):
            store.delete(job_id)
        else:
            store.cancel(job_id)
    _log.warning("api_dead", api=api.incarnation, jobs=len(api.job_ids))
