"""A proxy between the service and its Redis: passes bytes on until a rule says otherwise. One thread for each connection."""

import contextlib
import select
import socket
import threading
import time
from pathlib import Path
from typing import Protocol

_CHUNK = 65536
_TICK = 0.2


class Rule(Protocol):
    """What happens to the bytes of one read. ``None`` in place of bytes: both ends are closed, behind what was returned before."""

    fired: bool

    def pass_on(self, request: bool, data: bytes) -> list[bytes | None]: ...


class Cut:
    """Once: the first ``after`` bytes of one request (or reply) arrive, then the connection is gone. All of a shorter one."""

    def __init__(self, *, request: bool, after: int) -> None:
        self.fired = False
        self._request, self._after = request, after
        self._lock = threading.Lock()

    def pass_on(self, request: bool, data: bytes) -> list[bytes | None]:
        with self._lock:
            if self.fired or request is not self._request:
                return [data]
            self.fired = True
        return [data[: self._after], None]


class Delay:
    """Every read waits."""

    def __init__(self, seconds: float) -> None:
        self.fired = False
        self._seconds = seconds

    def pass_on(self, request: bool, data: bytes) -> list[bytes | None]:
        self.fired = True
        time.sleep(self._seconds)
        return [data]


class Crumbs:
    """Byte by byte."""

    def __init__(self) -> None:
        self.fired = False

    def pass_on(self, request: bool, data: bytes) -> list[bytes | None]:
        self.fired = True
        return [data[at : at + 1] for at in range(len(data))]


class Silence:
    """Half open: what is sent arrives nowhere, and nobody says so."""

    def __init__(self, *, request: bool) -> None:
        self.fired = False
        self._request = request

    def pass_on(self, request: bool, data: bytes) -> list[bytes | None]:
        if request is not self._request:
            return [data]
        self.fired = True
        return []


class Proxy:
    """Listens at ``path`` for clients of the Redis at ``upstream``, both Unix sockets. ``rule`` may change at any time."""

    def __init__(self, path: Path, upstream: Path) -> None:
        self.path = path
        self.rule: Rule | None = None
        self._upstream = upstream
        self._open = True
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen(64)
        self._listener.settimeout(_TICK)
        threading.Thread(target=self._accept, name="proxy", daemon=True).start()

    def close(self) -> None:
        self._open = False
        self._listener.close()

    def _accept(self) -> None:
        while self._open:
            with contextlib.suppress(TimeoutError, OSError):
                client, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(client,), name="proxied", daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with client, socket.socket(socket.AF_UNIX) as server, contextlib.suppress(OSError):
            server.connect(str(self._upstream))
            lost = False  # bytes were swallowed: a stream that goes on behind a hole would be another kind of fault
            while self._open:
                readable = select.select([client, server], [], [], _TICK)[0]
                if lost and self.rule is None:
                    return
                for source in readable:
                    data = source.recv(_CHUNK)
                    if not data:
                        return
                    request = source is client
                    pieces = [data] if self.rule is None else self.rule.pass_on(request, data)
                    lost = lost or not pieces
                    for piece in pieces:
                        if piece is None:
                            return
                        (server if request else client).sendall(piece)
