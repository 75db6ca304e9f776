"""A control group of our own that limits memory: what its processes cannot have, the kernel kills one of them for.

Version 2 of the interface where the machine's root group gives memory away, version 1 where that is mounted. Needs root.
"""

import os
import secrets
from pathlib import Path

from chaos.processes import wait_until

_ROOT = Path("/sys/fs/cgroup")
_REMOVE_TIMEOUT = 10.0


def _version() -> int | None:
    controllers = _ROOT / "cgroup.subtree_control"
    if controllers.exists() and "memory" in controllers.read_text().split():
        return 2
    return 1 if (_ROOT / "memory" / "memory.limit_in_bytes").exists() else None


def no_memory_group() -> str:
    """Why there can be none here; empty when there can."""
    if os.geteuid():
        return "it makes a control group, which needs root"
    if _version() is None:
        return f"no control group under {_ROOT} limits memory"
    return "" if os.access(_ROOT, os.W_OK) or _version() == 1 else f"{_ROOT} is read-only here"


class MemoryGroup:
    """Has no limit until it is given one. ``close`` when its processes are dead."""

    def __init__(self) -> None:
        self._is_v2 = _version() == 2
        self._folder = (_ROOT if self._is_v2 else _ROOT / "memory") / f"midsentence-chaos-{secrets.token_hex(4)}"
        self._folder.mkdir()

    @property
    def prelude(self) -> str:
        """Shell: this process, and the children that it will have, belong to the group."""
        return f"echo $$ > {self._folder}/cgroup.procs"

    def limit(self, size: int | None) -> None:
        """In bytes; None: no limit. OSError where so much is in use that cannot be taken back."""
        nothing = "max" if self._is_v2 else "-1"
        (self._folder / ("memory.max" if self._is_v2 else "memory.limit_in_bytes")).write_text(
            nothing if size is None else str(size)
        )

    @property
    def in_use(self) -> int:
        """Bytes; pages of files that the kernel can take back at any time are among them."""
        return int((self._folder / ("memory.current" if self._is_v2 else "memory.usage_in_bytes")).read_text())

    @property
    def oom_kills(self) -> int:
        """Processes of the group that the kernel has killed for want of memory."""
        lines = (self._folder / ("memory.events" if self._is_v2 else "memory.oom_control")).read_text().splitlines()
        return int(dict(line.split() for line in lines)["oom_kill"])

    def close(self) -> None:
        def removed() -> bool:
            try:
                self._folder.rmdir()
            except FileNotFoundError:
                return True
            except OSError:
                return False
            return True

        wait_until(removed, _REMOVE_TIMEOUT, f"the end of {self._folder}", pause=0.1)
