"""What the clients saw and what was done to the service: recorded outside it, as plain frozen values, one JSON line each.

Times are this driver's monotonic seconds. A status of None is *unknown*: the reply never came, and the request may have been
executed. Unknown stays unknown; nothing is ever guessed from it.
"""

import json
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self, TypeVar

T = TypeVar("T")

TERMINAL_EVENTS = frozenset({"done", "failed", "cancelled"})


@dataclass(frozen=True, slots=True)
class JobSeen:
    """A job as one answer of the api showed it."""

    status: str
    token_ids: tuple[int, ...] = ()
    text: str = ""
    finish_reason: str = ""
    error: str = ""
    recoveries: int = 0
    tokens_replayed: int = 0
    pages_restored: int = 0


@dataclass(frozen=True, slots=True)
class Call:
    """One request that is not a stream."""

    client: str
    operation: str  #: submit, get, cancel
    started: float
    ended: float
    status: int | None
    job_id: str = ""
    case: str = ""  #: submit: which kind of job
    key: str = ""  #: submit: the Idempotency-Key
    seen: JobSeen | None = None
    error: str = ""


@dataclass(frozen=True, slots=True)
class StreamOpened:
    """``reader`` is one position in one job's events, kept over all its reconnects."""

    reader: str
    job_id: str
    attempt: int
    at: float
    cursor: int | None  #: the Last-Event-ID that was sent
    status: int | None


@dataclass(frozen=True, slots=True)
class Event:
    reader: str
    job_id: str
    attempt: int
    at: float
    name: str
    id: int | None = None
    index: int | None = None
    token_ids: tuple[int, ...] = ()
    text: str = ""


@dataclass(frozen=True, slots=True)
class StreamClosed:
    reader: str
    job_id: str
    attempt: int
    at: float
    how: str  #: terminal, ended (by the server, without a terminal event), broken, silent, gave_up
    error: str = ""


@dataclass(frozen=True, slots=True)
class FaultRecord:
    name: str
    started: float
    ended: float
    fired: bool
    proof: str  #: what shows that it fired, or why it did not
    spoils: tuple[str, ...] = ()  #: pages of the pool that may be bad because of it: "host page 7", or "*" for any


Record = Call | StreamOpened | Event | StreamClosed | FaultRecord
_KINDS: dict[str, type[Any]] = {kind.__name__: kind for kind in (Call, StreamOpened, Event, StreamClosed, FaultRecord)}


class History:
    """All records of one run, in the order in which they were written. Any thread may write."""

    def __init__(self, path: Path | None = None) -> None:
        self._lock = threading.Lock()
        self._records: list[Record] = []
        self.tokens = 0  #: received so far, over all readers: progress, at a glance
        self._file = None if path is None else open(path, "a", encoding="utf-8", buffering=1)  # noqa: SIM115

    def add(self, record: Record) -> None:
        with self._lock:
            self._records.append(record)
            if isinstance(record, Event):
                self.tokens += len(record.token_ids)
            if self._file is not None:
                self._file.write(_to_line(record))

    def all(self, kind: type[T]) -> list[T]:
        with self._lock:
            return [record for record in self._records if isinstance(record, kind)]

    def shown(self) -> dict[str, int]:
        """How many tokens of each job any answer or stream has shown until now."""
        counts: dict[str, int] = {}
        for record in self:
            if isinstance(record, Event) and record.token_ids and record.id is not None:
                counts[record.job_id] = max(counts.get(record.job_id, 0), record.id)
            elif isinstance(record, Call) and record.seen is not None:
                counts[record.job_id] = max(counts.get(record.job_id, 0), len(record.seen.token_ids))
        return counts

    def __iter__(self) -> Iterator[Record]:
        with self._lock:
            return iter(tuple(self._records))

    def __len__(self) -> int:
        return len(self._records)

    def close(self) -> None:
        with self._lock:
            if self._file is not None:
                self._file.close()
                self._file = None

    @classmethod
    def of(cls, records: Iterable[Record]) -> Self:
        history = cls()
        for record in records:
            history.add(record)
        return history

    @classmethod
    def read(cls, path: Path) -> Self:
        """A history from its file: the checkers run on it as on a live one."""
        with open(path, encoding="utf-8") as lines:
            return cls.of(_from_line(line) for line in lines)


def now() -> float:
    return time.monotonic()


def _to_line(record: Record) -> str:
    return json.dumps({"kind": type(record).__name__, **asdict(record)}, ensure_ascii=False) + "\n"


def _from_line(line: str) -> Record:
    values: dict[str, Any] = json.loads(line)
    kind = _KINDS[values.pop("kind")]
    if isinstance(values.get("seen"), dict):
        values["seen"] = JobSeen(**{**values["seen"], "token_ids": tuple(values["seen"]["token_ids"])})
    for name in ("token_ids", "spoils"):
        if name in values:
            values[name] = tuple(values[name])
    record: Record = kind(**values)
    return record
