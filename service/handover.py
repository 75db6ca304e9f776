"""Another api in the place of one that runs, without a moment in which nobody listens.

The new one inherits the same listening socket and says by a pipe that it is ready. Only then is the old one told to retire. If the
new one dies first, the old one never noticed.
"""

import os
import time
from enum import Enum, auto

from service.children import Child, Death

_PATIENCE = 120.0  #: seconds until a new one that neither dies nor gets ready is given up


class Progress(Enum):
    WAITING = auto()
    READY = auto()
    FAILED = auto()


class Handover:
    """From the start of the ``new`` process beside the ``old`` one until one of the two stays. Belongs to the supervisor's loop."""

    def __init__(self, old: Child, death_pipe: int) -> None:
        self.old = old
        self.new = old.another()
        self.death: Death | None = None  #: how the new one ended, where it FAILED by itself
        self._began = time.monotonic()
        self.ready_pipe, writer = os.pipe2(os.O_CLOEXEC)
        try:
            self.new.start(death_pipe, tell={"--ready-fd": writer})
        finally:
            os.close(writer)

    def look(self) -> Progress:
        """Call when ``ready_pipe`` is readable, and now and then."""
        self.death = self.new.reap()
        if self.death is not None:
            return Progress.FAILED
        os.set_blocking(self.ready_pipe, False)
        try:
            if os.read(self.ready_pipe, 1):
                return Progress.READY  # at its end instead: the new one is just dying, and is reaped at the next look
        except BlockingIOError:
            pass
        return Progress.FAILED if time.monotonic() - self._began > _PATIENCE else Progress.WAITING

    def close(self) -> None:
        os.close(self.ready_pipe)
