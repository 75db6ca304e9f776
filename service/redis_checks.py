"""Is the server that answers on a socket the one this data directory needs? (PROTOCOL.md 8)"""

import os
import socket
import struct
from pathlib import Path

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from service.errors import RedisRefused

#: What keeps acknowledged writes: setting -> the only value accepted.
REQUIRED = {
    "appendonly": "yes",
    "appendfsync": "always",
    "no-appendfsync-on-rewrite": "no",
    "aof-load-truncated": "yes",
    "maxmemory-policy": "noeviction",
}


class NotNow(Exception):
    """The server does not answer yet (loading, stopped, ending): ask again. Says nothing against it."""


def connect(path: Path, *, timeout: float) -> redis.Redis:
    """A plain client. Without redis-py's ten silent retries: whoever calls this has a loop of its own."""
    return redis.Redis(
        unix_socket_path=str(path),
        socket_timeout=timeout,
        socket_connect_timeout=timeout,
        retry=Retry(NoBackoff(), 0),
        decode_responses=True,
    )


def examine(path: Path, redis_dir: Path, *, timeout: float = 2.0) -> int:
    """The pid of the server on ``path``, proved to be ours. Raises NotNow, RedisRefused."""
    pid = _peer(path, timeout)
    try:
        with connect(path, timeout=timeout) as client:
            info = client.info()
            if int(info.get("loading", 0)):
                raise NotNow("it is still loading its log")
            settings = client.config_get("*")
    except redis.BusyLoadingError as error:
        raise NotNow("it is still loading its log") from error
    except redis.ResponseError as error:
        raise RedisRefused(f"the Redis on {path} does not let us look at its settings: {error}", "it is not ours") from error
    except (redis.RedisError, OSError) as error:
        raise NotNow(f"it is running but not answering ({type(error).__name__})") from error
    if int(info["process_id"]) != pid:
        raise RedisRefused(f"the Redis on {path} runs in another container", "stop it there, or use --redis-url")
    _check_directory(settings, redis_dir)
    wrong = {name: settings.get(name) for name, value in REQUIRED.items() if settings.get(name) != value}
    if wrong:
        found = ", ".join(f"{name} {value}" for name, value in wrong.items())
        raise RedisRefused(
            f"the embedded Redis runs with other settings than ours: {found}", "stop it; `midsentence serve` starts it anew"
        )
    _check_log_is_on_disk(pid, redis_dir)
    return pid


def _peer(path: Path, timeout: float) -> int:
    """The pid of whoever listens on the socket, by the kernel's word. Raises RedisRefused when it is another user's."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(timeout)
        try:
            probe.connect(str(path))
        except (OSError, TimeoutError) as error:
            raise NotNow(f"its socket refuses connections ({error.strerror or error})") from error
        pid, uid, _gid = struct.unpack("3i", probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    if uid != os.geteuid():
        raise RedisRefused(f"the Redis on {path} runs as user {uid}, not as us ({os.geteuid()})", "run both as one user")
    return int(pid)


def _check_directory(settings: dict[str, str], redis_dir: Path) -> None:
    theirs = Path(settings.get("dir", ""))
    if not (theirs.exists() and theirs.samefile(redis_dir)):
        raise RedisRefused(
            f"the Redis that answers works in {theirs}, not in {redis_dir}",
            "this directory is a copy of one in use, or was moved",
        )


def _check_log_is_on_disk(pid: int, redis_dir: Path) -> None:
    """A log that was deleted or replaced under a running server still takes writes, and all of them are gone at its end."""
    folder = f"/proc/{pid}/fd"
    try:
        links = [os.path.join(folder, name) for name in os.listdir(folder)]
    except OSError as error:
        raise NotNow("it just ended") from error
    for link in links:
        try:
            target = os.readlink(link)
            if "/appendonlydir/" in target and os.path.samestat(os.stat(link), os.stat(target)):
                return
        except OSError:
            continue
    raise RedisRefused(
        f"the log of the running Redis (pid {pid}) is no longer in {redis_dir}: it was deleted or replaced",
        "its data is only in memory: run BGREWRITEAOF on it before anything else",
    )
