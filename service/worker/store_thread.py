"""The one thread of an engine that talks to the store, in order.

Claims, renewals and commits of an engine use one connection, so their answers are ordered. A call whose outcome is unknown is sent
again, the same call, until it is answered: without Redis the engine pauses here and loses nothing.
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from service.errors import RegistrationRefused
from storage.errors import EngineDead, StoreFull, StoreUnavailable, WrongStore
from storage.job_store import JobStore

T = TypeVar("T")
_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 1.0


class StoreThread:
    """Runs calls one after the other, and ``heartbeat`` once a second between them."""

    def __init__(
        self,
        store: JobStore,
        heartbeat: Callable[[JobStore], object],
        *,
        interval: float = 1.0,
        on_wake: Callable[[], None],
        on_death: Callable[[BaseException], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._heartbeat = heartbeat
        self._interval = interval
        self._on_wake = on_wake
        self._on_death = on_death
        self._clock = clock
        self._calls: deque[tuple[Callable[[JobStore], Any], Future[Any]]] = deque()
        self._beat_due = clock()
        self._pause = 0.0  #: between attempts at a call that was not answered; 0: the last one was
        self._again_at = 0.0
        self._submitted = threading.Event()
        self._closing = threading.Event()
        self._given_up = threading.Event()
        self.away_since: float | None = None  #: by ``clock``, since when the store has not answered
        self.away_reason = ""
        self._thread = threading.Thread(target=self._run, name="store", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def submit(self, call: Callable[[JobStore], T]) -> "Future[T]":
        """Queue a call. Its future fails only with what is final: EngineDead, WrongStore, RegistrationRefused."""
        future: Future[T] = Future()
        self._calls.append((call, future))
        self._submitted.set()
        return future

    def close(self, timeout: float) -> bool:
        """Run what is queued, then end. False when the store did not answer within ``timeout`` seconds."""
        self._closing.set()
        self._submitted.set()
        self._thread.join(timeout)
        self._given_up.set()
        return not self._thread.is_alive()

    def turn(self) -> float:
        """Make one attempt at the call that is next, if it is due. Returns after how many seconds to come again, unless a call
        is submitted first; 0: at once."""
        now = self._clock()
        if self._pause:
            if now < self._again_at:
                return self._again_at - now
        elif now >= self._beat_due:  # goes before what is queued: a busy queue must not starve it
            self._beat_due = now + self._interval
            self._calls.appendleft((self._heartbeat, Future()))
        if not self._calls:
            return self._beat_due - now
        self._attempt(*self._calls[0])
        return self._pause

    def _attempt(self, call: Callable[[JobStore], Any], future: "Future[Any]") -> None:
        try:
            result = call(self._store)
        except (StoreUnavailable, StoreFull) as error:
            self.away_since = self.away_since or self._clock()
            self.away_reason = str(error)
            self._pause = min(self._pause * 2 or _FIRST_PAUSE, _LONGEST_PAUSE)
            self._again_at = self._clock() + self._pause
            return
        except (EngineDead, WrongStore, RegistrationRefused) as error:
            self.away_since = None
            future.set_exception(error)
        else:
            self.away_since = None
            future.set_result(result)
        self._pause = 0.0
        self._calls.popleft()
        self._on_wake()

    def _run(self) -> None:
        try:
            while True:
                self._submitted.clear()
                if self._given_up.is_set() or (self._closing.is_set() and not self._calls):
                    return
                wait = self.turn()
                (self._given_up if self._pause else self._submitted).wait(wait)
        except BaseException as error:  # without this thread nothing would ever be durable again: end the process
            self._on_death(error)
