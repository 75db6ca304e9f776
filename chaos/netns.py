"""A network of our own for one run, in which packets of one direction are dropped: both ends live, and nobody is told.

A network namespace belongs to threads. The one that enters it, and all threads and processes begun from there, see no other network
than its loopback; nothing of it shows outside, and the kernel takes it away with the last of them, also after SIGKILL. Needs root.
"""

import contextlib
import ctypes
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

_CLONE_NEWNET = 0x40000000  # linux/sched.h; os.unshare comes with Python 3.12
_TOOLS = ("ip", "nft", "unshare")
#: What is received, behind the sender's back: dropped on its way out, a packet would be an error that TCP sees.
_CHAIN = "add table inet chaos; add chain inet chaos arriving { type filter hook input priority 0; }"
_libc = ctypes.CDLL(None, use_errno=True)


def no_own_network() -> str:
    """Why there can be no network of our own here; empty when there can."""
    if os.geteuid():
        return "it cuts a network of its own, which needs root"
    if missing := [tool for tool in _TOOLS if shutil.which(tool) is None]:
        return f"not here: {', '.join(missing)} (Debian: iproute2, nftables)"
    tried = subprocess.run(["unshare", "--net", "nft", _CHAIN], capture_output=True, text=True, stdin=subprocess.DEVNULL)
    return f"no network of our own: {tried.stderr.strip()}" if tried.returncode else ""


@contextlib.contextmanager
def own_network() -> Iterator[None]:
    """The block, on this thread, and what it starts. What was started before, or by other threads, is outside."""
    with open("/proc/thread-self/ns/net") as home:
        _check(_libc.unshare(_CLONE_NEWNET))
        try:
            _run("ip", "link", "set", "lo", "up")
            _run("nft", _CHAIN)
            yield
        finally:
            _check(_libc.setns(home.fileno(), _CLONE_NEWNET))


@dataclass(frozen=True, slots=True)
class Link:
    """TCP connections to one address and port, known to the rules by that alone: give each pair of processes its own."""

    name: str
    host: str
    port: int

    def packets(self, *, requests: bool) -> str:
        """An expression of nft: those to the address, or those from it."""
        way = "d" if requests else "s"
        return f"ip {way}addr {self.host} tcp {way}port {self.port}"


@contextlib.contextmanager
def cut(link: Link, *, requests: bool, replies: bool) -> Iterator[None]:
    """No packet of this direction, or of both, arrives. One cut at a time; ``dropped`` counts while it lasts."""
    ways = [way for way, chosen in ((True, requests), (False, replies)) if chosen]
    _run("nft", "; ".join(f"add rule inet chaos arriving {link.packets(requests=way)} counter drop" for way in ways))
    try:
        yield
    finally:
        _run("nft", "flush chain inet chaos arriving")


def dropped() -> tuple[int, ...]:
    """Packets that each rule of the cut took so far, by the kernel's count."""
    listed: dict[str, Any] = json.loads(_run("nft", "--json", "list", "chain", "inet", "chaos", "arriving"))
    rules = [each["rule"]["expr"] for each in listed["nftables"] if "rule" in each]
    return tuple(part["counter"]["packets"] for rule in rules for part in rule if "counter" in part)


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, stdin=subprocess.DEVNULL).stdout


def _check(result: int) -> None:
    if result:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
