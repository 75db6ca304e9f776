"""Crowds of clients that behave badly: they never read, say a byte now and then, stay silent, half close, or are gone at once."""

import contextlib
import socket
import struct
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from chaos.cluster import Cluster
from chaos.faults.base import Proof
from chaos.processes import wait_until

_ARRIVE_TIMEOUT = 30.0
_DRIP_PAUSE = 1.0
_ESTABLISHED = 1
_RESET_AT_CLOSE = struct.pack("ii", 1, 0)  # SO_LINGER on, for 0 seconds


@dataclass(frozen=True, slots=True)
class Connection:
    """As the kernel has it on the server's side."""

    state: int
    unsent: int  #: bytes that the client's side has not taken


def connections(port: int) -> dict[int, Connection]:
    """What a process holds on this port of loopback, by the port of the client."""
    found = {}
    for line in Path("/proc/thread-self/net/tcp").read_text().splitlines()[1:]:
        columns = line.split()
        own, peer = (int(columns[number].rpartition(":")[2], 16) for number in (1, 2))
        if own == port and peer and columns[9] != "0":  # 0: no process holds it any more
            found[peer] = Connection(int(columns[3], 16), int(columns[4].partition(":")[0], 16))
    return found


@dataclass(frozen=True, slots=True)
class Manner:
    """``shows``: whether the server's side of a connection (None: it is gone) is as this manner makes it."""

    name: str
    count: int
    shows: Callable[[Connection | None], bool]
    drip: bytes = b""  #: said once a second
    small_buffers: bool = False  #: takes no more than a few KiB that it does not read
    half_close: bool = False
    reset: bool = False
    may_stay: bool = False  #: the server need not end it


def _established(connection: Connection | None) -> bool:
    return connection is not None and connection.state == _ESTABLISHED


NEVER_READ = Manner("never read", 40, lambda connection: connection is not None and connection.unsent > 0, small_buffers=True)
SLOW_HEADS = Manner("heads, a byte a second", 60, _established, drip=b"x")
SLOW_BODIES = Manner("bodies, a byte a second", 40, _established, drip=b" ")
IDLE = Manner("idle streams", 500, _established, may_stay=True)
HALF_CLOSED = Manner("half closed", 50, lambda connection: connection is None, half_close=True)
RESET = Manner("reset in mid-stream", 50, lambda connection: connection is None, reset=True)
MANNERS = (NEVER_READ, SLOW_HEADS, SLOW_BODIES, IDLE, HALF_CLOSED, RESET)


@dataclass(slots=True)
class Crowd:
    """``openings`` are what each says at once; they are said in turn."""

    manner: Manner
    openings: Collection[bytes]
    sockets: list[socket.socket] = field(default_factory=list)
    ports: set[int] = field(default_factory=set)
    _gone: threading.Event = field(default_factory=threading.Event)

    @property
    def name(self) -> str:
        return f"{self.manner.count} clients: {self.manner.name}"

    def apply(self, cluster: Cluster) -> Proof:
        openings = list(self.openings)
        for number in range(self.manner.count):
            self._join(cluster.port, openings[number % len(openings)])
        if self.manner.drip:
            threading.Thread(target=self._keep_dripping, name="crowd", daemon=True).start()

        def shown() -> int:
            held = connections(cluster.port)
            return sum(self.manner.shows(held.get(port)) for port in self.ports)

        wait_until(lambda: shown() == self.manner.count, _ARRIVE_TIMEOUT, f"{self.name}: {shown()} so far", pause=0.1)
        return Proof(True, f"{shown()} of {self.manner.count} seen at the server")

    def left(self, held: Mapping[int, Connection]) -> int:
        return len(self.ports & held.keys())

    def answers(self) -> Iterator[bytes]:
        """What each was sent until now, or what is left of it."""
        for connection in self.sockets:
            connection.setblocking(False)
            received = b""
            with contextlib.suppress(OSError):
                while piece := connection.recv(65536):
                    received += piece
            yield received

    def close(self) -> None:
        self._gone.set()
        for connection in self.sockets:
            connection.close()

    def _join(self, port: int, opening: bytes) -> None:
        connection, manner = socket.socket(), self.manner
        self.sockets.append(connection)
        connection.settimeout(_ARRIVE_TIMEOUT)
        if manner.small_buffers:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, 536)  # the server's buffer grows by segments
        connection.connect(("127.0.0.1", port))
        self.ports.add(connection.getsockname()[1])
        connection.sendall(opening)
        if manner.half_close:
            connection.shutdown(socket.SHUT_WR)
        if manner.reset:
            connection.recv(1)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_AT_CLOSE)
            connection.close()

    def _keep_dripping(self) -> None:
        while not self._gone.wait(_DRIP_PAUSE):
            for connection in self.sockets:
                with contextlib.suppress(OSError):  # the server had enough of it
                    connection.send(self.manner.drip)
