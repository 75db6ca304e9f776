"""How this engine does just now, told about once a second while somebody listens: pages, rates, lag. No job's id, no text.

The books are looked at on the loop's thread, between two steps; everything else happens on a thread of its own.
"""

import json
import threading
import time
from collections.abc import Callable
from concurrent.futures import wait
from dataclasses import asdict
from itertools import groupby
from typing import Any

from engine.core import Engine
from engine.page_map import PageMap, page_map
from service.logs import get_logger
from service.worker.observer import Totals, checkpoint_lag
from service.worker.state import Identity, Wakeups
from storage.errors import StorageError
from storage.job_store import JobStore

INTERVAL = 1.0  #: seconds between two looks
_SHARE = 0.002  #: of the loop's time, at most, goes into looks: a pool of 100,000 pages is looked at less often
_ASK = ""  #: a message that says nothing: the store answers how many listen
_log = get_logger("engine.vitals")


class Vitals:
    """``identity`` gives the loop's own: it changes when the engine registers anew."""

    def __init__(
        self, engine: Engine, totals: Totals, identity: Callable[[], Identity], wakeups: Wakeups, *, interval: float = INTERVAL
    ) -> None:
        self._engine = engine
        self._totals = totals
        self._identity = identity
        self._wakeups = wakeups
        self._interval = interval

    def run(self, store: JobStore, stopping: threading.Event) -> None:
        """Until stopped. Nothing that goes wrong here may cost the engine more than its place on a page."""
        pause = self._interval
        while not stopping.wait(pause):
            pause = self._interval
            try:
                if store.publish_vitals(_ASK):
                    pause = max(pause, self._tell(store, stopping))
            except StorageError:  # away, or not ours: readiness says so
                pass
            except Exception:
                _log.exception("vitals_failed")
                pause = 60.0

    def _tell(self, store: JobStore, stopping: threading.Event) -> float:
        """One look, told. Seconds to wait before the next."""
        answer = self._wakeups.between_steps(self._look)
        while not wait([answer], timeout=0.5).done:  # for as long as a step takes, and no longer than we live
            if stopping.is_set():
                return 0.0
        pages, vitals, seconds = answer.result()
        store.publish_vitals(json.dumps(vitals | {"device": run_lengths(pages.device), "host": run_lengths(pages.host)}))
        return seconds / _SHARE

    def _look(self) -> tuple[PageMap, dict[str, Any], float]:
        """On the loop's thread. What it found, and how long that took."""
        began = time.perf_counter()
        engine, who = self._engine, self._identity()
        scheduler = engine.scheduler
        pages = page_map(engine.residency, (*scheduler.running, *scheduler.arriving))
        vitals = {
            "engine_id": who.info.engine_id,
            "incarnation": who.incarnation,
            "clock": time.monotonic(),
            "running": len(scheduler.running),
            "waiting": len(scheduler.waiting) + len(scheduler.arriving),
            "checkpoint_lag": checkpoint_lag(engine),
            "totals": asdict(self._totals),
        }
        return pages, vitals, time.perf_counter() - began


def run_lengths(letters: str) -> str:
    """``..oooS`` is ``2.3oS``."""
    runs = ((letter, sum(1 for _ in run)) for letter, run in groupby(letters))
    return "".join(f"{count if count > 1 else ''}{letter}" for letter, count in runs)
