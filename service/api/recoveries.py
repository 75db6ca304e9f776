"""When a stream tells its client that the job was recovered."""

from storage.records import JobRecord


class RecoveryWatch:
    """A recovery is in the record once the job has a new owner, its numbers with the owner's first commit: waits for those."""

    def __init__(self) -> None:
        self._told = 0
        self._counters = (0, 0)
        self._rise_at: int | None = None  #: log length when an untold recovery was first seen

    def begin(self, record: JobRecord) -> None:
        """What came before the stream is not told."""
        self._told, self._counters = record.recoveries, _counters(record)

    def is_news(self, record: JobRecord) -> bool:
        """True once for each recovery, or for several at once."""
        if record.recoveries <= self._told:
            return False
        if self._rise_at is None:
            self._rise_at = record.log_length
        counted = _counters(record) != self._counters or record.log_length > self._rise_at
        if not counted and not record.status.terminal:
            return False
        self._told, self._counters, self._rise_at = record.recoveries, _counters(record), None
        return True


def _counters(record: JobRecord) -> tuple[int, int]:
    return record.tokens_replayed, record.pages_restored
