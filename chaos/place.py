"""Where a run lives, and what its processes are started with."""

import contextlib
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True, slots=True)
class ClusterOptions:
    """What the service is started with. Sizes are small, so that pages run out, wrap around and are evicted."""

    model: str
    page_size: int = 16
    device_pages: int = 160
    host_pages: int = 480
    settings: Mapping[str, str] = field(default_factory=dict)  #: more MIDSENTENCE_* variables, by setting name
    root: Path = ROOT  #: of the sources that are run

    def environment(self) -> dict[str, str]:
        values = {"prefill_chunk": "64", "max_step_tokens": "128", "threads": "1", "lease_seconds": "4", **self.settings}
        return variables(values) | {"MIDSENTENCE_TESTING": "1"}


def variables(settings: Mapping[str, str]) -> dict[str, str]:
    """Settings by name, as the product reads them."""
    return {f"MIDSENTENCE_{name.upper()}": value for name, value in settings.items()}


@dataclass(frozen=True, slots=True)
class Engine:
    """An engine's place: its data directory and where its metrics are."""

    name: str
    data_dir: Path
    port: int


def after(prelude: str, command: Sequence[str]) -> list[str]:
    """The same process, which first does what shell can do to it."""
    return ["sh", "-ec", f'{prelude}\nexec "$@"', "sh", *command]


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
