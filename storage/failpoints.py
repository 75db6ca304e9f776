"""Named places around each durable write where a test can kill, stop, delay or fail this very process.

``MIDSENTENCE_FAILPOINTS="commit.before_send=kill@3;pool.mid_write=stop"`` acts on the n-th hit (the first without ``@``, each one
with ``@*``). Actions: kill (SIGKILL), stop (SIGSTOP), exit, abort, raise, sleep:SECONDS, and for points of a file eio (the device
fails) and partial (the disk is full: in the middle of a write, what was written so far stays). Refused unless
``MIDSENTENCE_TESTING=1``. Each point that fires appends one line ``name action pid`` to ``MIDSENTENCE_FAILPOINT_LOG`` *before* it
acts: a run whose fault did not fire is a failed run.
"""

import errno
import os
import re
import signal
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass

#: The points of storage/. ``pool.before_zero`` needs pages whose time is over, or that a crash left.
#: Names are free: a misspelt one never fires, and the log shows that.
FAILPOINTS = (
    "commit.before_send",
    "commit.after_send",
    "commit.after_reply",
    "finish.before_send",
    "finish.after_reply",
    "submit.before_send",
    "submit.after_reply",
    "cancel.after_reply",
    "claim.after",
    "register.after",
    "take_over.after",
    "renew.before",
    "release.before",
    "store_file.before_rename",
    "store_file.after_rename",
    "pool.before_write",
    "pool.mid_write",
    "pool.after_write",
    "pool.before_sync",
    "pool.before_zero",
)
_SYNTAX = re.compile(
    r"([a-z_.0-9]+)=(?:(kill|stop|exit|abort|raise|eio|partial)|sleep:([0-9]{1,6}(?:[.][0-9]{1,6})?))"
    r"(?:@([1-9][0-9]{0,8}|[*]))?"
)


class FailpointError(RuntimeError):
    """What the action ``raise`` raises."""


@dataclass(frozen=True, slots=True)
class Failpoint:
    name: str
    action: str
    argument: float
    at: int  #: acts on this hit, counted from 1; 0: on each


def parse(text: str) -> dict[str, Failpoint]:
    """Raises RuntimeError for what it does not know: a fault that silently never fires is worse than none."""
    points: dict[str, Failpoint] = {}
    for part in filter(None, (piece.strip() for piece in text.split(";"))):
        match = _SYNTAX.fullmatch(part)
        if match is None:
            actions = "kill|stop|exit|abort|raise|eio|partial|sleep:SECONDS"
            raise RuntimeError(f"failpoint {part!r} is not NAME={actions}[@N], N from 1 or *")
        name, action, seconds, at = match.groups()
        points[name] = Failpoint(name, action or "sleep", float(seconds or 0), 0 if at == "*" else int(at or 1))
    return points


class Failpoints:
    """The points of one process. ``hit`` costs one dict look-up when there are none."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._points = parse(environ.get("MIDSENTENCE_FAILPOINTS", ""))
        self._log = environ.get("MIDSENTENCE_FAILPOINT_LOG", "")
        self._hits: dict[str, int] = {}
        self._lock = threading.Lock()
        if self._points and environ.get("MIDSENTENCE_TESTING") != "1":
            raise RuntimeError("MIDSENTENCE_FAILPOINTS is for tests only: refused without MIDSENTENCE_TESTING=1")

    def hit(self, name: str) -> None:
        point = self._points.get(name)
        if point is None:
            return
        with self._lock:
            self._hits[name] = hits = self._hits.get(name, 0) + 1
        if point.at not in (0, hits):
            return
        if hits == max(1, point.at):
            self._record(point)
        _act(point)

    def armed(self, prefix: str) -> bool:
        return any(name.startswith(prefix) for name in self._points)

    def _record(self, point: Failpoint) -> None:
        if not self._log:
            return
        fd = os.open(self._log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            os.write(fd, f"{point.name} {point.action} {os.getpid()}\n".encode())
        finally:
            os.close(fd)


def _act(point: Failpoint) -> None:
    if point.action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif point.action == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif point.action == "exit":
        os._exit(70)
    elif point.action == "abort":
        os.abort()
    elif point.action == "eio":
        raise OSError(errno.EIO, f"failpoint {point.name}")
    elif point.action == "partial":
        raise OSError(errno.ENOSPC, f"failpoint {point.name}")
    elif point.action == "raise":
        raise FailpointError(f"failpoint {point.name}")
    else:
        time.sleep(point.argument)


_process = Failpoints(os.environ)


def hit(name: str) -> None:
    _process.hit(name)


def armed(prefix: str) -> bool:
    """Whether any point of this process begins so: for points whose names are made of data."""
    return _process.armed(prefix)
