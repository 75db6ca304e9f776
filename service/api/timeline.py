"""What happened to engines and store since this api began: deaths, take-overs, recoveries. Kept in memory, for people to look at.

An api sees only that a beat stands still and that another incarnation registers; what an engine died of, its supervisor's log says.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from storage.records import EngineRecord

Kind = Literal[
    "api_started", "store_away", "store_back", "engine_started", "engine_killed", "engine_silent", "engine_back",
    "engine_taken_over", "jobs_recovered",
]  # fmt: skip
_KEPT = 100
_SILENT_AFTER = 3.0  #: seconds without a beat, of which there is one a second; dead is only who misses a whole lease


@dataclass(slots=True)
class Moment:
    """``at``: seconds since the epoch, by this api's clock."""

    at: float
    kind: Kind
    engine_id: str = ""
    seconds: float | None = None  #: how long it was away, where it came back
    jobs: int | None = None
    pages_restored: int | None = None
    tokens_replayed: int | None = None


@dataclass(slots=True)
class _Life:
    incarnation: str
    beat: int
    moved_at: float  #: when a beat was seen last
    dead: bool
    silent: bool = False
    recovery: Moment | None = None


class Timeline:
    """The sweep's thread and the event loop both tell it things."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._moments: deque[Moment] = deque([Moment(clock(), "api_started")], maxlen=_KEPT)
        self._lives: dict[str, _Life] | None = None  #: None before the first look
        self._away_since: float | None = None

    def moments(self) -> list[dict[str, Any]]:
        """Oldest first."""
        with self._lock:
            return [asdict(moment) for moment in sorted(self._moments, key=lambda moment: moment.at)]

    @property
    def store_away_since(self) -> float | None:
        with self._lock:
            return self._away_since

    def silent_seconds(self, engine_id: str) -> float | None:
        """Since its last beat. None: it was not seen."""
        with self._lock:
            life = (self._lives or {}).get(engine_id)
            return None if life is None else max(0.0, self._clock() - life.moved_at)

    def could_not_look(self) -> None:
        with self._lock:
            if self._away_since is None:
                self._away_since = self._clock()
                self._note("store_away")

    def looked(self, engines: tuple[EngineRecord, ...]) -> None:
        with self._lock:
            now = self._clock()
            if self._away_since is not None:
                self._note("store_back", seconds=now - self._away_since)
                for known in (self._lives or {}).values():  # nobody could beat meanwhile
                    known.moved_at = now
                self._away_since = None
            first, self._lives = self._lives is None, self._lives or {}
            for record in engines:
                life = self._lives.get(record.info.engine_id)
                if life is None or life.incarnation != record.incarnation:
                    self._began(record, life, now, first=first)
                else:
                    self._went_on(record, life, now)

    def _began(self, record: EngineRecord, before: _Life | None, now: float, *, first: bool) -> None:
        assert self._lives is not None
        engine_id = record.info.engine_id
        if before is not None and not (before.silent or before.dead):
            self._note("engine_silent", engine_id, at=before.moved_at)
        if not first:
            self._note("engine_started", engine_id, seconds=None if before is None else now - before.moved_at)
        self._lives[engine_id] = _Life(record.incarnation, record.beat, now, record.dead)

    def _went_on(self, record: EngineRecord, life: _Life, now: float) -> None:
        engine_id = record.info.engine_id
        if record.dead and not life.dead:  # another api took its jobs over
            self._note("engine_taken_over", engine_id)
        life.dead = record.dead
        if record.beat != life.beat:
            if life.silent:
                self._note("engine_back", engine_id, seconds=now - life.moved_at)
            life.beat, life.moved_at, life.silent = record.beat, now, False
        elif not (life.silent or life.dead) and now - life.moved_at > _SILENT_AFTER:
            life.silent = True
            self._note("engine_silent", engine_id, at=life.moved_at)

    def taken_over(self, engine_id: str, jobs: int) -> None:
        with self._lock:
            self._note("engine_taken_over", engine_id, jobs=jobs)
            if self._lives is not None and engine_id in self._lives:
                self._lives[engine_id].dead = True

    def killed(self) -> None:
        """By the button, which only the engine of our own supervisor hears."""
        with self._lock:
            self._note("engine_killed")

    def recovered(self, engine_id: str, incarnation: str, totals: Mapping[str, Any]) -> None:
        """What this life of an engine says that it took up again, so far."""
        with self._lock:
            life = (self._lives or {}).get(engine_id)
            if not totals["recovered"] or life is None or life.incarnation != incarnation:
                return
            if life.recovery is None:
                life.recovery = self._note("jobs_recovered", engine_id)
            life.recovery.jobs = totals["recovered"]
            life.recovery.pages_restored, life.recovery.tokens_replayed = totals["pages_restored"], totals["tokens_replayed"]

    def _note(
        self, kind: Kind, engine_id: str = "", *, at: float | None = None, seconds: float | None = None, jobs: int | None = None
    ) -> Moment:
        moment = Moment(self._clock() if at is None else at, kind, engine_id, seconds, jobs)
        self._moments.append(moment)
        return moment
