"""What the engine's loop is made of: who it is, what it was given, what others may see of it."""

import secrets
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any, Protocol, TypeVar

from engine.core import StepResult
from engine.sequence import Restart
from recovery.sequences import Held
from storage.errors import WrongStore
from storage.job_store import JobStore
from storage.records import Commit, EngineInfo, JobRecord, LogEntry, LogRead, OwnedJob, StepAnswers

_T = TypeVar("_T")
_LOG_PAGE = 10_000  #: log entries per read when a job is taken in


class Observer(Protocol):
    """What the loop tells the outside: metrics. Called on the loop's thread."""

    def stepped(self, result: StepResult, seconds: float) -> None: ...

    def committed(self, answers: StepAnswers, commits: tuple[Commit, ...], seconds: float) -> None: ...

    def admitted(self, held: Held, restored_pages: int, restart: Restart) -> None: ...

    def dropped(self, job_id: str, reason: str) -> None: ...

    def declared_dead(self) -> None: ...

    def lost(self, tokens: int) -> None: ...


@dataclass(frozen=True, slots=True)
class Identity:
    """Who this engine is. The incarnation changes when it was declared dead and registers anew."""

    info: EngineInfo
    incarnation: str
    arithmetic_fingerprint: str


@dataclass(frozen=True, slots=True)
class Taken:
    """A job given to us, with its record and whole log."""

    owned: OwnedJob
    record: JobRecord
    entries: tuple[LogEntry, ...]


@dataclass(slots=True)
class LoopState:
    """What other threads may read: plain values, replaced whole."""

    registered: bool = False
    step_started: float | None = None  #: monotonic
    draining: bool = False
    refused: WrongStore | None = None
    refused_since: float = 0.0
    held: tuple[str, ...] = ()
    scanned: bool = False  #: the jobs found at registration were taken in


@dataclass(slots=True)
class Wakeups:
    event: threading.Event = field(default_factory=threading.Event)
    claim: threading.Event = field(default_factory=threading.Event)
    _looks: "SimpleQueue[tuple[Callable[[], Any], Future[Any]]]" = field(default_factory=SimpleQueue)

    def wake(self) -> None:
        self.event.set()

    def hint(self) -> None:
        """Something changed in the store: there may be a job to claim."""
        self.claim.set()
        self.event.set()

    def between_steps(self, look: Callable[[], _T]) -> "Future[_T]":
        """Have the loop's own thread look at its books: nobody else may. ``look`` must be quick, and change nothing."""
        future: Future[_T] = Future()
        self._looks.put((look, future))
        self.event.set()
        return future

    def take_looks(self) -> None:
        """On the loop's thread."""
        while not self._looks.empty():
            look, future = self._looks.get()
            try:
                future.set_result(look())
            except Exception as error:  # whoever asked is told; the loop has nothing to do with it
                future.set_exception(error)


def new_incarnation() -> str:
    """One life of an engine: random, so that no number can be used again after Redis lost its tail."""
    return secrets.token_hex(8)


def take_in(store: JobStore, owned: tuple[OwnedJob, ...]) -> list[Taken]:
    """Read the record and the whole log of jobs that were just given to us, in one round trip per page of log. Reads only."""
    slices = store.read([LogRead(job.job_id, 0, _LOG_PAGE) for job in owned])
    taken = []
    for job, first in zip(owned, slices, strict=True):
        if first is None:
            continue
        entries = list(first.entries)
        while len(entries) < first.record.log_length:
            (more,) = store.read([LogRead(job.job_id, len(entries), _LOG_PAGE)])
            if more is None or not more.entries:
                break
            entries += more.entries
        taken.append(Taken(job, first.record, tuple(entries[: first.record.log_length])))
    taken.sort(key=lambda t: (-t.record.priority, t.record.order))
    return taken
