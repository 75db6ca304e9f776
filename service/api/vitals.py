"""What engines say of themselves, for all viewers: one subscription while there is a viewer, none otherwise."""

import contextlib
import json
import threading
import time
from collections.abc import Iterator
from typing import Any

from service.api.context import Context
from service.logs import get_logger
from storage.errors import StorageError
from storage.vitals import VitalsFeed

_BACK_OFF = 1.0
_log = get_logger("api.vitals")


class Vitals:
    """The latest of each engine, with when it came, in seconds since the epoch."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._lock = threading.Lock()
        self._viewers = 0
        self._thread: threading.Thread | None = None
        self._latest: dict[str, tuple[float, dict[str, Any]]] = {}

    def latest(self, engine_id: str, incarnation: str) -> tuple[float, dict[str, Any]] | None:
        """Of this life of the engine."""
        found = self._latest.get(engine_id)
        return found if found is not None and found[1]["incarnation"] == incarnation else None

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        with self._lock:
            self._viewers += 1
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="vitals", daemon=True)
                self._thread.start()
        try:
            yield
        finally:
            with self._lock:
                self._viewers -= 1

    # --- thread ------------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        feed: VitalsFeed | None = None
        while self._is_watched():
            try:
                if feed is None:
                    feed = self._context.store.run_here(lambda store: store.vitals())
                for text in feed.wait(1.0):
                    self._take(text)
            except StorageError:  # the sweep says so
                time.sleep(_BACK_OFF)
            except Exception:
                _log.exception("vitals_failed")
                time.sleep(_BACK_OFF)
        if feed is not None:
            feed.close()

    def _is_watched(self) -> bool:
        with self._lock:
            if not self._viewers:
                self._thread = None
            return self._viewers > 0

    def _take(self, text: str) -> None:
        vitals: dict[str, Any] = json.loads(text)
        self._latest[vitals["engine_id"]] = time.time(), vitals
        self._context.timeline.recovered(vitals["engine_id"], vitals["incarnation"], vitals["totals"])
