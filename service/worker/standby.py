"""An engine that waits for its turn: what needs neither lock nor port nor store is done before the one that serves has died."""

import contextlib
import mmap
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from engine import model_source, packed_weights, pool_memory
from service.children import LastExit
from service.logs import get_logger
from service.settings import Settings
from service.worker import garbage
from service.worker.build import Loaded, load, prove
from service.worker.phases import Phases

log = get_logger("engine")

_OOM_FIRST, _MOST = 300, 1000  #: added to oom_score_adj while waiting, up to its most: a want of memory ends us, and not who serves


@dataclass(frozen=True, slots=True)
class Turn:
    """What an engine that waited begins with."""

    last_exit: LastExit
    loaded: Loaded | None  #: None: the model is loaded now
    phases: Phases
    memory: mmap.mmap | None = None  #: of the device pool of the engine that died, mapped


def wait_for_turn(settings: Settings, turn_fd: int, memory_fd: int | None = None) -> Turn | None:
    """Prepare, then wait for the word at ``turn_fd``. None: it was closed without one.

    ``memory_fd``: of the serving engine's device pool. Nothing is read or written there before it is dead.
    """
    os.set_inheritable(turn_fd, False)
    memory = None
    if memory_fd is not None:
        memory = pool_memory.share(memory_fd)
        threading.Thread(target=pool_memory.claim, args=(memory,), name="claim-memory", daemon=True).start()
    with _first_to_be_killed(), open(turn_fd) as turn:
        # Weights that are not packed would be in memory twice, and a device's memory is the serving engine's.
        packed = settings.device == "cpu" and _is_packed(settings)
        loaded = prove(settings, load(settings)) if packed else None
        garbage.settle()
        log.info("standby_ready", model=loaded is not None)
        word = turn.readline().strip()
    if not word:
        return None
    phases = Phases.from_now()
    log.info("standby_takes_over", last_exit=word)
    return Turn(LastExit(word), loaded, phases, memory)


def _is_packed(settings: Settings) -> bool:
    fingerprint = model_source.fingerprint(model_source.resolve(settings.model))
    return packed_weights.folder_for(fingerprint, settings.weights).is_dir()


@contextlib.contextmanager
def _first_to_be_killed() -> Iterator[None]:
    """Where the kernel does not let us choose, all stays as it is."""
    place = Path("/proc/self/oom_score_adj")
    with contextlib.suppress(OSError):
        before = int(place.read_text())
        place.write_text(str(min(_MOST, before + _OOM_FIRST)))
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            place.write_text(str(before))
