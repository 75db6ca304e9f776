"""A wall clock of a process's own that can be set while it runs, by a library of 40 lines that is preloaded into it.

libfaketime does as much, and more: it also bends sleeps, and Python's ``time.sleep`` fails under it (EINVAL, its version 0.9.10).
"""

import os
import shutil
import struct
import subprocess
from pathlib import Path

_SOURCE = Path(__file__).with_name("clock.c")


def no_clock() -> str:
    """Why there can be none here; empty when there can."""
    return "" if shutil.which("cc") else "not here: a C compiler (cc)"


def build(library: Path) -> Path:
    """Compile what the processes are given. Raises CalledProcessError."""
    subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", library, _SOURCE], check=True, stdin=subprocess.DEVNULL)
    return library


class Clock:
    """Begins as the machine's."""

    def __init__(self, path: Path, library: Path) -> None:
        self._path, self._library = path, library
        self.put(0)

    @property
    def prelude(self) -> str:
        """Shell: this process and its children go by this clock."""
        return f"export CHAOS_CLOCK='{self._path}' LD_PRELOAD='{self._library}'"

    def put(self, seconds: int) -> None:
        """So far ahead of the machine's clock, from this moment on."""
        fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.pwrite(fd, struct.pack("=q", seconds), 0)
        finally:
            os.close(fd)
