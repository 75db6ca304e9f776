"""A real service on a directory of its own and free ports, in one of the two shapes in which it is deployed.

``serve``: the supervisor runs the embedded Redis, the engine and the api, and starts again what dies.
``apart``: Redis, api and engines are processes of their own, as compose or systemd run them; here this driver starts again what
dies, so that each life of an engine can be given its own failpoint.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx

from chaos.processes import Family, Timeout, wait_until
from service.redis_server import binary_path

ROOT = Path(__file__).resolve().parent.parent
#: Roles under one supervisor.
ROLES = ("supervisor", "engine", "api", "redis")
START_TIMEOUT = 90.0
_TAIL = 2000


class ClusterError(Exception):
    """The service did not do what a start or an end asks of it; carries the end of its log."""


@dataclass(frozen=True, slots=True)
class ClusterOptions:
    """What the service is started with. Sizes are small, so that pages run out, wrap around and are evicted."""

    model: str
    page_size: int = 16
    device_pages: int = 160
    host_pages: int = 480
    settings: Mapping[str, str] = field(default_factory=dict)  #: more MIDSENTENCE_* variables, by setting name

    def environment(self) -> dict[str, str]:
        values = {"prefill_chunk": "64", "max_step_tokens": "128", "threads": "1", "lease_seconds": "4", **self.settings}
        return {f"MIDSENTENCE_{name.upper()}": value for name, value in values.items()} | {"MIDSENTENCE_TESTING": "1"}


@dataclass(frozen=True, slots=True)
class Engine:
    """An engine's place: its data directory and where its metrics are."""

    name: str
    data_dir: Path
    port: int


class Cluster:
    """Owns every process it started, and their children; ends them all when it is left, however that happens."""

    def __init__(self, place: Path, options: ClusterOptions) -> None:
        self.place = place
        self.options = options
        self.family = Family(place)
        self.logs = place / "logs"
        self.logs.mkdir(parents=True, exist_ok=True)
        self.failpoint_log = place / "failpoints.log"
        port, engine_port = free_ports(2)
        self.port = port
        self.main = Engine("engine", place / "data", engine_port)
        self._redis_url: str | None = None  #: of the shape "apart"
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.family.end()

    # --- where things are ---------------------------------------------------------------------------------------------

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def redis_url(self) -> str:
        if self._redis_url is not None:
            return self._redis_url
        return f"unix://{(self.main.data_dir / 'run' / 'redis.socket').read_text().strip()}"

    def pid(self, role: str) -> int | None:
        """The living process in a role; None when there is none. The pid file may name a dead one: that is none."""
        process = self._processes.get(role)
        if process is not None:
            return process.pid if process.poll() is None else None
        try:
            pid = int((self.main.data_dir / "run" / f"{role}.pid").read_text())
        except (OSError, ValueError):
            return None
        return None if self.family.gone(pid) else pid

    def require_pid(self, role: str, timeout: float = START_TIMEOUT) -> int:
        wait_until(lambda: self.pid(role) is not None, timeout, f"a living {role}")
        pid = self.pid(role)
        return pid if pid is not None else self.require_pid(role, timeout)

    def wait_changed(self, role: str, old: int, timeout: float = START_TIMEOUT) -> int:
        """Wait for another process in this role."""
        wait_until(lambda: self.pid(role) not in (None, old), timeout, f"a new {role} after {old}")
        return self.require_pid(role, timeout)

    # --- the shape "serve" --------------------------------------------------------------------------------------------

    def serve(self, *, wait: bool = True) -> None:
        self._processes.pop("supervisor", None)
        self._processes["supervisor"] = self._start("serve", self._serve_command())
        if wait:
            self.wait_ready()

    def _serve_command(self) -> list[str]:
        return [*self._command("serve", self.main), "--host", "127.0.0.1", "--port", str(self.port)]

    def serve_again_beside(self) -> subprocess.CompletedProcess[str]:
        """A second ``serve`` on the same directory, to its end."""
        return self._to_the_end(self._serve_command())

    def engine_again_beside(self) -> subprocess.CompletedProcess[str]:
        port = free_ports(1)[0]
        place = Engine("second", self.main.data_dir, port)
        return self._to_the_end([*self._command("engine", place), "--redis-url", self.redis_url])

    def recover(self, *flags: str) -> dict[str, Any]:
        """``midsentence recover --json`` with ``flags``."""
        command = [*_cli("recover"), "--data-dir", str(self.main.data_dir), "--model", self.options.model, "--json", *flags]
        done = self._to_the_end(command)
        try:
            report = json.loads(done.stdout)
        except ValueError:
            raise ClusterError(
                f"recover answered no JSON (exit {done.returncode}): {done.stdout[-500:]}{done.stderr[-500:]}"
            ) from None
        assert isinstance(report, dict)
        return report

    # --- the shape "apart" --------------------------------------------------------------------------------------------

    def start_redis(self) -> None:
        folder = self.place / "redis"
        folder.mkdir(exist_ok=True)
        path = folder / "redis.sock"
        settings = {
            "port": "0", "unixsocket": str(path), "dir": str(folder), "appendonly": "yes", "appendfsync": "always", "save": "",
            "maxmemory": str(256 << 20), "maxmemory-policy": "noeviction", "aof-load-truncated": "yes",
        }  # fmt: skip
        arguments = [part for name, value in settings.items() for part in (f"--{name}", value)]
        self._processes["redis"] = self._start("redis", [str(binary_path()), *arguments])
        self._redis_url = f"unix://{path}"
        wait_until(path.is_socket, 10.0, "the socket of Redis")

    def start_api(self) -> None:
        command = [*self._command("api", self.main), "--host", "127.0.0.1", "--port", str(self.port)]
        self._processes["api"] = self._start("api", [*command, "--redis-url", self.redis_url])

    def start_engine(self, place: Engine | None = None, failpoints: str = "") -> None:
        """Start an engine by hand. ``last-exit`` is told as a supervisor would tell it: our kills are no fault of a job."""
        place = place or self.main
        command = [*self._command("engine", place), "--redis-url", self.redis_url, "--last-exit", "benign", "--lock-wait", "10"]
        points = {"MIDSENTENCE_FAILPOINTS": failpoints} if failpoints else {}
        self._processes[place.name] = self._start(place.name, command, points)

    def another_engine(self, name: str) -> Engine:
        return Engine(name, self.place / name, free_ports(1)[0])

    # --- ready, and the end -------------------------------------------------------------------------------------------

    def ready(self, url: str | None = None) -> bool:
        with contextlib.suppress(httpx.HTTPError):
            return httpx.get(f"{url or self.url}/readyz", timeout=2.0).status_code == 200
        return False

    def wait_ready(self, timeout: float = START_TIMEOUT) -> None:
        """Until the api and the engine both say so. Raises ClusterError at once when the supervisor ended instead."""
        supervisor = self._processes.get("supervisor")
        deadline = time.monotonic() + timeout
        engine_url = f"http://127.0.0.1:{self.main.port}"
        while not (self.ready() and self.ready(engine_url)):
            if supervisor is not None and supervisor.poll() is not None:
                raise ClusterError(f"serve ended with {supervisor.returncode}:\n{self.log_tail('serve')}")
            if time.monotonic() > deadline:
                raise ClusterError(
                    f"not ready within {timeout:g} s:\n{self.log_tail('serve')}{self.log_tail('engine')}{self.log_tail('api')}"
                )
            time.sleep(0.05)

    def wait_exit(self, role: str, timeout: float) -> int:
        """The exit code of a process that this driver started. Raises Timeout."""
        try:
            return self._processes[role].wait(timeout)
        except subprocess.TimeoutExpired:
            raise Timeout(f"{role} did not end within {timeout:g} s") from None

    def signal(self, role: str, number: signal.Signals) -> int:
        """Signal the process in a role; answers with its pid."""
        pid = self.require_pid(role)
        if not self.family.signal(pid, number):
            return self.signal(role, number)
        return pid

    def stop(self, timeout: float = 40.0) -> int | None:
        """SIGTERM to everything, supervisor or each; the exit code of the supervisor."""
        for role in ("supervisor", *(name for name in self._processes if name not in ("supervisor", "redis")), "redis"):
            process = self._processes.get(role)
            if process is not None and process.poll() is None:
                process.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(timeout)
        supervisor = self._processes.get("supervisor")
        return None if supervisor is None else supervisor.poll()

    def kill_all(self) -> list[int]:
        """SIGKILL to every process of the service at once: none can react to another's death."""
        pids = self.family.living()
        for pid in pids:
            self.family.signal(pid, signal.SIGSTOP)
        for pid in pids:
            self.family.signal(pid, signal.SIGKILL)
        wait_until(lambda: not self.family.living(), 10.0, "the end of all processes", pause=0.05)
        return pids

    def log_tail(self, name: str) -> str:
        with contextlib.suppress(OSError):
            return f"--- {name}\n" + (self.logs / f"{name}.log").read_text(errors="replace")[-_TAIL:] + "\n"
        return ""

    # --- internals ----------------------------------------------------------------------------------------------------

    def _command(self, verb: str, place: Engine) -> list[str]:
        options = self.options
        flags: dict[str, object] = {
            "model": options.model,
            "data-dir": place.data_dir,
            "engine-port": place.port,
            "page-size": options.page_size,
            "device-pages": options.device_pages,
            "host-pages": options.host_pages,
        }
        return [*_cli(verb), *(part for name, value in flags.items() for part in (f"--{name}", str(value)))]

    def _start(self, name: str, command: Sequence[str], more: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
        environment = self._environment() | dict(more or {})
        return self.family.start(command, environment=environment, log=self.logs / f"{name}.log", folder=ROOT)

    def _environment(self) -> dict[str, str]:
        return self.options.environment() | {"MIDSENTENCE_FAILPOINT_LOG": str(self.failpoint_log)}

    def _to_the_end(self, command: Sequence[str]) -> subprocess.CompletedProcess[str]:
        environment = self.family.environment(self._environment())
        return subprocess.run(
            command, env=environment, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=START_TIMEOUT
        )


def _cli(verb: str) -> list[str]:
    return [sys.executable, "-m", "service.cli", verb]


def free_ports(count: int) -> list[int]:
    """Ports that were free just now; all held at once, so that they differ."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for held in sockets:
            held.bind(("127.0.0.1", 0))
        return [int(held.getsockname()[1]) for held in sockets]


def fired_failpoints(log: Path) -> list[str]:
    """Lines ``name action pid``, in the order in which they fired."""
    with contextlib.suppress(OSError):
        return [line for line in log.read_text().splitlines() if line]
    return []


def private_place(base: Path, name: str) -> Path:
    """A directory for one run. Its path stays short: a socket's path has about a hundred bytes."""
    place = base / name
    place.mkdir(mode=0o700, parents=True)
    os.chmod(place, 0o700)
    return place
