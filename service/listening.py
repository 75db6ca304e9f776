"""The api's listening socket: bound here, inherited from systemd, or handed down by the supervisor.

Under ``midsentence serve`` the supervisor holds it and every api inherits it. So the port is never given up between two apis: a
connection that is made while one of them ends waits in the kernel's queue for the other.
"""

import os
import socket
from types import TracebackType
from typing import Any, Self

from service.errors import PortInUse, ServiceError, SettingsError
from service.processes import FileLock
from service.settings import Settings

#: Seconds in which a client must take a byte of what is sent to it (a silent stream sends a comment every 15 s). One that is gone
#: without a word, or never reads, would hold its connection for a quarter of an hour, or for ever.
UNREAD_SECONDS = 60.0
_FIRST_FROM_SYSTEMD = 3  #: sd_listen_fds(3)


def take_socket(settings: Settings) -> socket.socket:
    """systemd's (``deploy/systemd/midsentence.socket``) where it gave us one; else our own. Raises PortInUse, SettingsError."""
    if os.environ.get("LISTEN_PID") != str(os.getpid()):  # these variables are meant for another process, or not there
        return bind(settings.host, settings.port)
    if os.environ.get("LISTEN_FDS") != "1":
        raise ServiceError(f"systemd gave {os.environ.get('LISTEN_FDS')} sockets", "name one ListenStream= in the socket unit")
    sock = adopt(_FIRST_FROM_SYSTEMD)
    asked = _addresses(settings.host, settings.port)[0][4]
    if sock.getsockname() != asked:  # whether others reach it, and so need keys, was judged by the settings
        found = sock.getsockname()
        sock.close()
        raise SettingsError(
            f"systemd listens on {found}, and host and port say {asked}", "make ListenStream= and the settings agree"
        )
    return sock


def adopt(fd: int) -> socket.socket:
    """An inherited socket, which whoever gave it to us holds too: closing ours does not close the port. Raises ServiceError."""
    try:
        os.set_inheritable(fd, False)
        sock = socket.socket(fileno=fd)
    except OSError as error:
        raise ServiceError(f"descriptor {fd} is no socket: {error.strerror}", "it is for whoever starts us to open") from error
    _prepare(sock)
    return sock


def bind(host: str, port: int) -> socket.socket:
    """Take the port before anything else is done, so that a taken one is refused with words. Port 0: any. Raises PortInUse.

    Nobody listens yet: until the model is known, a client is refused at once instead of being left to wait.
    """
    family, kind, protocol, _, address = _addresses(host, port)[0]
    try:
        sock = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ServiceError(f"cannot listen on {host}: {error.strerror}", "check --host") from error
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        _prepare(sock)
        sock.bind(address)
    except OSError as error:
        sock.close()
        raise PortInUse(
            f"cannot listen on {host} port {port}: {error.strerror}", "stop what listens there, or choose another --port"
        ) from error
    return sock


def _addresses(host: str, port: int) -> list[tuple[Any, ...]]:
    try:
        return [*socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)]
    except OSError as error:
        raise ServiceError(f"cannot listen on {host}: {error.strerror}", "check --host") from error


def _prepare(sock: socket.socket) -> None:
    sock.setblocking(False)
    if sock.family in (socket.AF_INET, socket.AF_INET6):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(UNREAD_SECONDS * 1000))  # its connections inherit it


class ApiPort:
    """The api's port and its lock, held by the supervisor for every api that it starts, one after the other or two at once.

    Each api inherits both descriptors, so the lock lives as long as the last of them, as that of the embedded Redis does.
    """

    def __init__(self, settings: Settings, *, wait: float) -> None:
        self._settings = settings
        self._wait = wait
        self._lock = FileLock(settings.run_dir / "api.lock", f"an api on {settings.data_dir}")
        self._sock: socket.socket | None = None

    @property
    def fd(self) -> int:
        assert self._sock is not None, "the port is not held"
        return self._sock.fileno()

    @property
    def inherited(self) -> tuple[int, ...]:
        return self.fd, self._lock.fd

    def __enter__(self) -> Self:
        """Waits for an api of a killed supervisor to be gone, which may take a moment. Raises AlreadyRunning, PortInUse."""
        self._lock.acquire(self._wait)
        try:
            self._sock = take_socket(self._settings)
        except BaseException:
            self._lock.release()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Ours; an api that still runs keeps its own, until it ends."""
        if self._sock is not None:
            self._sock.close()
            self._sock = None
            self._lock.release()
