"""How processes are told apart, locked, and tied to each other's death (PROTOCOL.md 8).

A child dies with its parent by a **death pipe**: the parent keeps the write end and never writes; the child reads and ends itself
at end of file, which the kernel delivers however the parent died. PR_SET_PDEATHSIG is the second line only: it fires when the
spawning *thread* ends, so children are spawned from the main thread alone.
"""

import contextlib
import ctypes
import fcntl
import os
import resource
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from enum import IntEnum
from pathlib import Path
from types import TracebackType
from typing import Self

from service.errors import AlreadyRunning, DirectoryError, LimitTooLow
from service.settings import OTHER_VARIABLES, PREFIX

MIN_OPEN_FILES = 256  #: of one process: an engine takes 40, an api as many and one for each stream
_PR_SET_PDEATHSIG = 1


class Exit(IntEnum):
    """What the exit code of a command says."""

    OK = 0
    FAILED = 1
    USAGE = 2  #: an unknown flag; from ``verify``: damage
    STEP_TIMEOUT = 70  #: EX_SOFTWARE: the engine ended itself because a step hung; counts as a crash
    CONFIG = 78  #: EX_CONFIG: configuration, store or lock refused; starting again would not help


def harden() -> None:
    """First thing in every process: files are ours alone, no core dump holds a prompt, as many descriptors as we may have."""
    os.umask(0o077)
    _, files = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):  # each open stream takes one, and 1,024 is a common soft limit
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def check_surroundings() -> None:
    """What no process of ours can do without. Raises LimitTooLow, DirectoryError, with the fix."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files != resource.RLIM_INFINITY and files < MIN_OPEN_FILES:
        raise LimitTooLow(f"a process may have {files} open files here, and needs {MIN_OPEN_FILES}", "ulimit -n 4096, or more")
    try:
        tempfile.gettempdir()
    except FileNotFoundError as error:  # torch asks for it as it is imported, and ends the engine with a traceback
        raise DirectoryError(
            "there is no directory for temporary files: neither TMPDIR nor /tmp nor /var/tmp can be written to",
            "set TMPDIR to a directory that can",
        ) from error


def prepare_directory(path: Path) -> Path:
    """Make the directory, 0700, if it is not there. Raises DirectoryError, with the fix, where it cannot be used or trusted."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = path.stat()
    except OSError as error:
        raise DirectoryError(f"cannot make the directory {path}: {error.strerror}", "choose another --data-dir") from error
    if status.st_mode & stat.S_IWOTH:
        raise DirectoryError(f"everybody can write to {path}: what lies there could be put there by others", f"chmod 700 {path}")
    if status.st_uid != os.geteuid():
        raise DirectoryError(
            f"{path} belongs to user {status.st_uid}, not to us ({os.geteuid()})", "chown it, or choose another --data-dir"
        )
    if not os.access(path, os.W_OK | os.X_OK):
        raise DirectoryError(f"{path} is not writable", "check the mount and the mode of the directory")
    return path


class FileLock:
    """An exclusive ``flock``, whose file names the holder's pid for people. Freed by the kernel with its last descriptor."""

    def __init__(self, path: Path, what: str) -> None:
        self.path = path
        self._what = what
        self._fd: int | None = None

    def acquire(self, wait: float = 0.0) -> Self:
        """Take the lock, trying for ``wait`` seconds. Raises AlreadyRunning with the holder's pid."""
        deadline = time.monotonic() + wait
        while not self.try_acquire():
            if time.monotonic() >= deadline:
                holder = self.holder()
                name = f"process {holder}" if holder else "another process"
                raise AlreadyRunning(f"{self._what} is already running: {name} holds {self.path}", "stop it first")
            time.sleep(0.05)
        return self

    def try_acquire(self) -> bool:
        try:
            fd = private_opener(self.path, os.O_RDWR | os.O_CREAT)
        except OSError as error:
            raise DirectoryError(f"cannot open {self.path}: {error.strerror}", "it must be a file of ours, and no link") from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return False
        try:
            same = os.path.samestat(os.fstat(fd), os.stat(self.path))
        except FileNotFoundError:
            same = False
        if not same:  # the file was replaced under us: our lock is on a file nobody else will ever open
            os.close(fd)
            return False
        self._fd = fd
        self.name_holder(os.getpid())
        return True

    @property
    def fd(self) -> int:
        assert self._fd is not None, "lock is not held"
        return self._fd

    def name_holder(self, pid: int) -> None:
        os.ftruncate(self.fd, 0)
        os.pwrite(self.fd, f"{pid}\n".encode(), 0)

    def holder(self) -> int | None:
        """The pid that the lock file names: for messages, never for signals."""
        try:
            return int(self.path.read_text())
        except (OSError, ValueError):
            return None

    def release(self) -> None:
        """Close our descriptor. A child that inherited it keeps the lock: that is how Redis holds its own."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.release()


def private_opener(path: str | os.PathLike[str], flags: int) -> int:
    """For ``open(..., opener=)`` on files of the data directory: ours alone, never through a symbolic link, not inherited."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


def write_private(path: Path, text: str) -> None:
    """Put a small file in place, whole. What lay there, a symbolic link too, is replaced and not written to."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.unlink(missing_ok=True)
    with open(beside, "x", encoding="utf-8", opener=private_opener) as file:
        file.write(text)
    os.replace(beside, path)


def lock_is_held(path: Path) -> bool:
    """Whether some process holds the ``flock`` on this file. Changes nothing: a FileLock would write its pid there."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def write_pid_file(path: Path, pid: int) -> None:
    """For people (and for tests that kill from outside): no code of ours signals by it."""
    write_private(path, f"{pid}\n")


def spawn(
    command: Sequence[str], *, environment: Mapping[str, str], death_pipe: int, pass_fds: Sequence[int] = ()
) -> subprocess.Popen[bytes]:
    """A child in its own process group (the terminal's Ctrl-C reaches the supervisor alone), tied to us by ``--death-pipe``."""
    assert threading.current_thread() is threading.main_thread(), "PDEATHSIG fires when the spawning thread ends"
    return subprocess.Popen(
        [*command, "--death-pipe", str(death_pipe)],
        env=environment,
        stdin=subprocess.DEVNULL,
        pass_fds=(death_pipe, *pass_fds),
        process_group=0,
        umask=0o077,
    )


def die_with_parent(death_pipe: int) -> None:
    """In a child: end at once, without clean-up, when the parent is gone. The log and the locks need none."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

    def watch() -> None:
        while os.read(death_pipe, 1):
            pass
        os._exit(Exit.FAILED)

    os.set_inheritable(death_pipe, False)
    threading.Thread(target=watch, name="death-pipe", daemon=True).start()


def describe_exit(returncode: int) -> str:
    """``-9`` is "SIGKILL", ``70`` is "exit 70"."""
    if returncode >= 0:
        return f"exit {returncode}"
    try:
        return signal.Signals(-returncode).name
    except ValueError:
        return f"signal {-returncode}"


def python_command(*arguments: str) -> list[str]:
    """Our own command line in a new process. ``-P``: a folder named ``service`` where the user happens to stand is not ours."""
    return [sys.executable, "-P", "-m", "service.cli", *arguments]


def child_environment(variables: Mapping[str, str]) -> dict[str, str]:
    """This process's environment with ``variables`` in place of all our own settings."""
    ours = {key for key in os.environ if key.startswith(PREFIX) and key not in OTHER_VARIABLES}
    environment = {key: value for key, value in os.environ.items() if key not in ours}
    root = Path(__file__).resolve().parent.parent
    if root.name != "site-packages":  # run from a checkout
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(root), environment.get("PYTHONPATH")]))
    return environment | dict(variables)
