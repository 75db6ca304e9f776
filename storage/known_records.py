"""The job records read last, so that a reader that comes back asks for what changes alone, and makes only that anew."""

import sys
import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from storage.records import JobRecord

#: Of a record without its prompt and its spec.
_RECORD_BYTES = 2000
#: Of a token id in a tuple: the reference, and the number itself.
_TOKEN_BYTES = 36


@dataclass(frozen=True, slots=True)
class Known:
    """``changing``: the values of ``codec.MUTABLE`` that ``record`` was made with."""

    record: JobRecord
    changing: tuple[Any, ...]

    @property
    def size(self) -> int:
        """Bytes, about."""
        return _RECORD_BYTES + sys.getsizeof(self.record.spec) + _TOKEN_BYTES * len(self.record.prompt_token_ids)


class KnownRecords:
    """As many as fit into ``limit`` bytes: a prompt can be a million times longer than another. The newest is kept whatever its
    size. Thread-safe."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._by_job: OrderedDict[str, Known] = OrderedDict()
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._by_job)

    def get(self, job_id: str, order: int) -> Known | None:
        """None: unknown. A job that was purged and made again has another ``order``."""
        with self._lock:
            known = self._by_job.get(job_id)
            return known if known is not None and known.record.order == order else None

    def keep(self, known: Known) -> None:
        job_id = known.record.job_id
        with self._lock:
            old = self._by_job.pop(job_id, None)
            self._by_job[job_id] = known
            self._bytes += known.size - (old.size if old is not None else 0)
            while self._bytes > self._limit and len(self._by_job) > 1:
                _, oldest = self._by_job.popitem(last=False)
                self._bytes -= oldest.size
