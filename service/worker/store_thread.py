"""The one thread of an engine that talks to the store, in order.

Claims, renewals and commits of an engine use one connection, so their answers are ordered. A call whose outcome is unknown is sent
again, the same call, until it is answered: without Redis the engine pauses here and loses nothing.
"""

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

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
    ) -> None:
        self._store = store
        self._heartbeat = heartbeat
        self._interval = interval
        self._on_wake = on_wake
        self._on_death = on_death
        self._calls: queue.SimpleQueue[tuple[Callable[[JobStore], Any], Future[Any]] | None] = queue.SimpleQueue()
        self._closing = threading.Event()
        self.away_since: float | None = None  #: monotonic time since which the store has not answered
        self.away_reason = ""
        self._thread = threading.Thread(target=self._run, name="store", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def submit(self, call: Callable[[JobStore], T]) -> "Future[T]":
        """Queue a call. Its future fails only with what is final: EngineDead, WrongStore, or our own bug."""
        future: Future[T] = Future()
        self._calls.put((call, future))
        return future

    def close(self, timeout: float) -> bool:
        """Run what is queued, then end. False when the store did not answer within ``timeout`` seconds."""
        self._calls.put(None)
        self._thread.join(timeout)
        self._closing.set()
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            due = time.monotonic()
            while True:
                try:
                    item = self._calls.get(timeout=max(0.0, due - time.monotonic()))
                except queue.Empty:
                    due = time.monotonic() + self._interval
                    self._repeat(self._heartbeat, Future())
                    continue
                if item is None:
                    return
                self._repeat(*item)
                if time.monotonic() >= due:  # a busy queue must not starve the beat
                    due = time.monotonic() + self._interval
                    self._repeat(self._heartbeat, Future())
        except BaseException as error:  # without this thread nothing would ever be durable again: end the process
            self._on_death(error)

    def _repeat(self, call: Callable[[JobStore], Any], future: "Future[Any]") -> None:
        pause = _FIRST_PAUSE
        while not self._closing.is_set():
            try:
                result = call(self._store)
            except (StoreUnavailable, StoreFull) as error:
                self.away_since = self.away_since or time.monotonic()
                self.away_reason = str(error)
                self._closing.wait(pause)
                pause = min(pause * 2, _LONGEST_PAUSE)
                continue
            except (EngineDead, WrongStore) as error:
                self.away_since = None
                future.set_exception(error)
            else:
                self.away_since = None
                future.set_result(result)
            self._on_wake()
            return
