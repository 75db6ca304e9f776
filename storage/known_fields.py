"""What was read of jobs and never changes, so that a reader that comes back asks for the rest alone."""

import sys
import threading
from collections import OrderedDict
from collections.abc import Mapping

from storage.codec import MUTABLE


class KnownFields:
    """Of the jobs read last, as many as fit into ``limit`` bytes: a prompt can be a million times longer than another. The newest
    is kept whatever its size. Thread-safe."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._by_job: OrderedDict[tuple[str, int], dict[str, str]] = OrderedDict()
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._by_job)

    def get(self, job_id: str, order: int) -> dict[str, str] | None:
        """None: unknown. A job that was purged and made again has another ``order``."""
        with self._lock:
            return self._by_job.get((job_id, order))

    def keep(self, job_id: str, order: int, fields: Mapping[str, str]) -> None:
        fixed = {name: value for name, value in fields.items() if name not in MUTABLE}
        with self._lock:
            self._bytes -= _size(self._by_job.pop((job_id, order), {}))
            self._by_job[job_id, order] = fixed
            self._bytes += _size(fixed)
            while self._bytes > self._limit and len(self._by_job) > 1:
                _, oldest = self._by_job.popitem(last=False)
                self._bytes -= _size(oldest)


def _size(fields: Mapping[str, str]) -> int:
    return sum(sys.getsizeof(name) + sys.getsizeof(value) for name, value in fields.items())
