"""A real service on a directory of its own and free ports, in one of the two shapes in which it is deployed.

``serve``: the supervisor runs the embedded Redis, the engine and the api, and starts again what dies.
``apart``: Redis, api and engines are processes of their own, as compose or systemd run them; here this driver starts again what
dies, so that each life of an engine can be given its own failpoint.
"""

import contextlib
import json
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, Self

import httpx
import redis

from chaos.netns import Link
from chaos.place import ClusterOptions, Engine, after, free_ports, variables
from chaos.processes import Family, Timeout, wait_until
from chaos.proxy import Proxy
from service.redis_server import binary_path

#: Roles under one supervisor.
ROLES = ("supervisor", "engine", "api", "redis")
#: A first start compiles kernels, which takes a minute of a core that nobody else wants.
START_TIMEOUT = 170.0
_TAIL = 2000


class ClusterError(Exception):
    """The service did not do what a start or an end asks of it; carries the end of its log."""


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
        self._ways_to_redis: dict[str, str] = {}  #: of its api and engines, by their names, where it is another
        self._links: dict[str, Link] = {}
        #: process -> shell commands that it begins with: limits, masks, clocks, groups. Its children inherit what they set
        self.preludes: dict[str, str] = {}
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

    @property
    def redis_dir(self) -> Path:
        """Of the shape "apart"."""
        return self.place / "redis"

    def pid(self, role: str) -> int | None:
        """The living process in a role; None when there is none. The pid file may name a dead one: that is none."""
        process = self._processes.get(role)
        if process is not None:
            return None if self.family.gone(process.pid) else process.pid
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

    def serve_to_the_end(self, prelude: str = "") -> subprocess.CompletedProcess[str]:
        """A ``serve`` that is to be refused: because it is the second one, or for what ``prelude`` did."""
        return self._to_the_end(after(prelude, self._serve_command()))

    def engine_again_beside(self) -> subprocess.CompletedProcess[str]:
        port = free_ports(1)[0]
        place = Engine("second", self.main.data_dir, port)
        return self._to_the_end([*self._command("engine", place), "--redis-url", self.redis_url])

    def recover(self, *flags: str, place: Engine | None = None) -> dict[str, Any]:
        """``midsentence recover --json`` with ``flags``, on an engine's directory."""
        return self._report("recover", *self._directory(place), "--model", self.options.model, *flags)

    def verify(self, place: Engine | None = None) -> dict[str, Any]:
        """``midsentence verify --json`` of an engine's directory, running or not."""
        return self._report("verify", *self._directory(place))

    def _directory(self, place: Engine | None) -> list[str]:
        url = [] if self._redis_url is None else ["--redis-url", self._redis_url]
        return ["--data-dir", str((place or self.main).data_dir), *url]

    def _report(self, verb: str, *flags: str) -> dict[str, Any]:
        done = self._to_the_end([*_cli(verb), "--json", *flags])
        try:
            report = json.loads(done.stdout)
        except ValueError:
            raise ClusterError(
                f"{verb} answered no JSON (exit {done.returncode}): {done.stdout[-500:]}{done.stderr[-500:]}"
            ) from None
        assert isinstance(report, dict)
        return report

    # --- the shape "apart" --------------------------------------------------------------------------------------------

    def start_redis(self) -> None:
        """The first time, or again on the same directory."""
        folder = self.redis_dir
        folder.mkdir(exist_ok=True)
        path = folder / "redis.sock"
        settings = {
            "port": "0", "unixsocket": str(path), "dir": str(folder), "appendonly": "yes", "appendfsync": "always", "save": "",
            "maxmemory": str(256 << 20), "maxmemory-policy": "noeviction", "aof-load-truncated": "yes",
        }  # fmt: skip
        for link in self._links.values():
            settings |= {"port": str(link.port), "bind": f"{settings.get('bind', '')} {link.host}".strip()}
        arguments = [part for name, value in settings.items() for part in (f"--{name}", value)]
        self._processes["redis"] = self._start("redis", [str(binary_path()), *arguments])
        self._redis_url = f"unix://{path}"
        wait_until(lambda: path.is_socket() and self._redis_answers(), 30.0, "an answer of Redis")

    def _redis_answers(self) -> bool:
        with contextlib.suppress(redis.RedisError), contextlib.closing(redis.Redis.from_url(self.redis_url)) as client:
            return bool(client.ping())
        return False

    def put_proxy(self) -> Proxy:
        """Between Redis and what is started from now on, but for more engines; this driver itself goes past it."""
        proxy = Proxy(self.redis_dir / "proxy.sock", self.redis_dir / "redis.sock")
        self._ways_to_redis = dict.fromkeys(("api", self.main.name), f"unix://{proxy.path}")
        return proxy

    def put_links(self, *names: str) -> dict[str, Link]:
        """Before Redis is started: TCP for these processes, an address for each, so that each can be cut off alone."""
        port = free_ports(1)[0]
        self._links = {name: Link(f"{name}-Redis", f"127.0.1.{number}", port) for number, name in enumerate(names, 1)}
        self._ways_to_redis = {name: f"redis://{link.host}:{link.port}" for name, link in self._links.items()}
        return self._links

    def _way_to_redis(self, name: str) -> str:
        return self._ways_to_redis.get(name, self.redis_url)

    def start_api(self, failpoints: str = "") -> None:
        command = [*self._command("api", self.main), "--host", "127.0.0.1", "--port", str(self.port)]
        points = {"MIDSENTENCE_FAILPOINTS": failpoints} if failpoints else {}
        self._processes["api"] = self._start("api", [*command, "--redis-url", self._way_to_redis("api")], points)

    def start_engine(
        self, place: Engine | None = None, failpoints: str = "", settings: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        """Start an engine by hand. ``last-exit`` is told as a supervisor would tell it: our kills are no fault of a job.

        ``settings``: for this life alone.
        """
        place = place or self.main
        command = [
            *self._command("engine", place),
            "--redis-url",
            self._way_to_redis(place.name),
            "--last-exit",
            "benign",
            "--lock-wait",
            "10",
        ]
        more = dict(settings) | ({"failpoints": failpoints} if failpoints else {})
        self._processes[place.name] = self._start(place.name, command, variables(more))

    def another_engine(self, name: str) -> Engine:
        return Engine(name, self.place / name, free_ports(1)[0])

    def start_beside(self, name: str, command: Sequence[str], prelude: str) -> int:
        """A process that is none of the product's. Its pid."""
        process = self.family.start(after(prelude, command), environment={}, log=self.logs / f"{name}.log", folder=self.place)
        return process.pid

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
        """Signal the process in a role; answers with its pid. Who dies before it is reached is no answer: the next one is."""
        while not self.family.signal(pid := self.require_pid(role), number):
            time.sleep(0.01)
        return pid

    def stop_role(self, role: str, timeout: float = 40.0) -> int:
        """SIGTERM to one process that this driver started; its exit code."""
        self.signal(role, signal.SIGTERM)
        return self.wait_exit(role, timeout)

    def stop(self, timeout: float = 40.0) -> int | None:
        """SIGTERM to everything, supervisor or each; the exit code of the supervisor."""
        self.stop_all_but_redis(timeout)
        self._terminate("redis", timeout)
        supervisor = self._processes.get("supervisor")
        return None if supervisor is None else supervisor.poll()

    def stop_all_but_redis(self, timeout: float = 40.0) -> None:
        """SIGTERM to the supervisor, whose Redis ends with it; or to each but a Redis of its own."""
        for role in ("supervisor", *(name for name in self._processes if name not in ("supervisor", "redis"))):
            self._terminate(role, timeout)

    def _terminate(self, role: str, timeout: float) -> None:
        process = self._processes.get(role)
        if process is not None and process.poll() is None:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout)

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
        if prelude := self.preludes.get(name):
            command = after(prelude, command)
        return self.family.start(command, environment=environment, log=self.logs / f"{name}.log", folder=self.options.root)

    def _environment(self) -> dict[str, str]:
        return self.options.environment() | {"MIDSENTENCE_FAILPOINT_LOG": str(self.failpoint_log)}

    def _to_the_end(self, command: Sequence[str]) -> subprocess.CompletedProcess[str]:
        environment = self.family.environment(self._environment())
        return subprocess.run(
            command,
            env=environment,
            cwd=self.options.root,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=START_TIMEOUT,
        )


def _cli(verb: str) -> list[str]:
    return [sys.executable, "-m", "service.cli", verb]
