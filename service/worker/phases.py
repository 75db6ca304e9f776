"""How long the parts of a start took, for the log: a start is most of what a crash costs."""

import os
import time
from pathlib import Path


def process_age() -> float:
    """Seconds since the kernel made this process, by a clock that nobody sets; the kernel notes it in hundredths."""
    started = Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()[19]
    return time.clock_gettime(time.CLOCK_BOOTTIME) - int(started) / os.sysconf("SC_CLK_TCK")


class Phases:
    """Seconds by phase, in order, without gaps: the first began with the process, or ``began`` seconds later."""

    def __init__(self, began: float = 0.0) -> None:
        self.seconds: dict[str, float] = {}
        self._ended = began  #: age of the process when the last phase ended

    @classmethod
    def from_now(cls) -> "Phases":
        return cls(process_age())

    def end(self, phase: str) -> None:
        """``phase`` ends here, and the next one begins."""
        age = process_age()
        self.seconds[phase] = round(age - self._ended, 4)
        self._ended = age
