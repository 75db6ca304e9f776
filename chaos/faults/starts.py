"""Starts where something is missing that the service needs: refused in words that name the fix, or served all the same."""

import socket
import stat
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from chaos.cluster import Cluster
from chaos.faults.base import DRAIN_TIMEOUT, Proof
from chaos.processes import vitals, wait_until
from service.processes import MIN_OPEN_FILES, Exit

_FLOOD_SECONDS = 3.0
_NO_CACHE = "export XDG_CACHE_HOME=/proc/none; unset NUMBA_CACHE_DIR"


@dataclass(frozen=True, slots=True)
class RefusedStart:
    """``serve`` after ``prelude`` must end with 78, its last line must say ``fix``, and nothing of it may be left."""

    name: str
    prelude: str
    fix: str

    def apply(self, cluster: Cluster) -> Proof:
        done = cluster.serve_to_the_end(self.prelude)
        last = "".join(done.stderr.strip().splitlines()[-1:])
        left = cluster.family.living()
        refused = done.returncode == Exit.CONFIG and self.fix in last
        return Proof(refused and not left, f"exit {done.returncode}: {last}; left running: {left}")


def refused_starts(data_dir: Path) -> tuple[RefusedStart, ...]:
    own = f"mount --bind {data_dir} {data_dir}"
    all_others = (
        'for place in $(cut -d" " -f2 /proc/self/mounts); do '
        f"[ $place = {data_dir} ] || mount -o remount,bind,ro $place 2>/dev/null || :; done"
    )
    return (
        RefusedStart("few open files", f"ulimit -n {MIN_OPEN_FILES - 1}", "ulimit -n"),
        RefusedStart("the data directory is read-only", _mounted(f"{own}; mount -o remount,bind,ro {data_dir}"), "check the mount"),
        RefusedStart("nothing but the data directory can be written to", _mounted(f"{own}; {all_others}"), "set TMPDIR"),
        RefusedStart("no place for compiled kernels", _NO_CACHE, "set XDG_CACHE_HOME"),
    )


def _mounted(commands: str) -> str:
    """Shell: with mounts that only this process and its children see."""
    return f"""exec unshare --mount sh -ec '{commands}; exec "$@"' sh "$@\""""


@dataclass(frozen=True, slots=True)
class OpenMask:
    """The service is started with umask 000, which takes nothing away from anybody; ``check_modes`` looks at what it makes."""

    name: str = "umask 000"

    def apply(self, cluster: Cluster) -> Proof:
        made = cluster.place / "made-by-shell"
        cluster.preludes["serve"] = f"umask 000\n: > {made}\nulimit -n {MIN_OPEN_FILES}"
        cluster.serve()
        mode = stat.S_IMODE(made.stat().st_mode)
        return Proof(mode == 0o666, f"what the shell made has mode {mode:o}")


def open_to_others(data_dir: Path) -> list[str]:
    """What anybody else than the owner may touch."""
    found = ((path, stat.S_IMODE(path.lstat().st_mode)) for path in (data_dir, *data_dir.rglob("*")))
    return [f"{path} {mode:o}" for path, mode in found if mode & 0o077]


@dataclass(frozen=True, slots=True)
class Flood:
    """More connections than the api may have files open: for a while it can take nobody else's, and open none of its own."""

    name: str = "connections until the api has no descriptor left"

    def apply(self, cluster: Cluster) -> Proof:
        pid = cluster.require_pid("api")
        with ExitStack() as stack:
            for _ in range(MIN_OPEN_FILES):
                held = stack.enter_context(socket.socket())
                held.setblocking(False)
                held.connect_ex(("127.0.0.1", cluster.port))
            wait_until(lambda: vitals(pid).descriptors >= MIN_OPEN_FILES, DRAIN_TIMEOUT, self.name)
            time.sleep(_FLOOD_SECONDS)
        lives = cluster.pid("api") == pid
        return Proof(lives, f"api {pid} had {MIN_OPEN_FILES} files open, and {'lives' if lives else 'died'}")
