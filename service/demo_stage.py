"""A real ``midsentence serve`` in a temporary directory, for the demo: started, killed piece by piece, ended."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from service.child_ready import why_not_ready
from service.errors import ServiceError
from service.processes import child_environment, describe_exit, python_command

_READY_WITHIN = 600.0  #: seconds: the first start converts the model and compiles the kernels
#: Room for the demo's two jobs and their checkpoints, and quick to make.
_PAGES = ("--device-pages", "64", "--host-pages", "128")


class DemoFailed(ServiceError):
    """Something did not go as promised."""

    exit_code = 1


class Stage:
    """The running server. ``kill`` does what a bad day does."""

    def __init__(self, data_dir: Path, model: str) -> None:
        self.data_dir = data_dir
        self.log_file = data_dir / "serve.log"
        port, engine_port = _free_ports(2)
        self.url = f"http://127.0.0.1:{port}"
        command = python_command("serve", "--data-dir", str(data_dir), "--model", model, "--port", str(port))
        with open(self.log_file, "ab") as log:
            self._process = subprocess.Popen(
                [*command, "--engine-port", str(engine_port), "--demo-controls", *_PAGES],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=child_environment({}),
                process_group=0,  # Ctrl-C ends the demo, and the demo ends the server
            )

    def wait_until_ready(self, on_wait: Callable[[str], None]) -> None:
        deadline = time.monotonic() + _READY_WITHIN
        while why := why_not_ready(self.url):
            if self._process.poll() is not None:
                raise DemoFailed(f"the server ended ({describe_exit(self._process.returncode)}): {self._last_words()}")
            if time.monotonic() >= deadline:
                raise DemoFailed(f"the server was not ready after {_READY_WITHIN:.0f} s: {why}", f"see {self.log_file}")
            on_wait(why)
            time.sleep(0.1)

    def kill(self, name: str) -> int:
        """SIGKILL to the engine, the api or redis; the pid it had. From outside, like anybody who reads the pid file."""
        pid = int((self.data_dir / "run" / f"{name}.pid").read_text())
        os.kill(pid, signal.SIGKILL)
        return pid

    def replaced(self, name: str, pid: int) -> bool:
        """Whether another process has taken the place of the killed one."""
        with contextlib.suppress(OSError, ValueError):
            return int((self.data_dir / "run" / f"{name}.pid").read_text()) != pid
        return False

    def end(self) -> None:
        if self._process.poll() is None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(30)
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()

    def _last_words(self) -> str:
        lines = self.log_file.read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else "without a word"


@contextlib.contextmanager
def stage(model: str, keep: Path | None) -> Iterator[Stage]:
    """A server in ``keep``, or in a temporary directory, which goes unless something failed."""
    directory = Path(tempfile.mkdtemp(prefix="midsentence-demo-")) if keep is None else keep.absolute()
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    server = Stage(directory, model)
    try:
        yield server
    except Exception:
        keep = directory
        raise
    finally:
        server.end()
        if keep is None:
            shutil.rmtree(directory, ignore_errors=True)
        else:
            print(f"Data and logs are in {directory}", file=sys.stderr)


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
