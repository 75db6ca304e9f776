"""Puts pools, caches and copies together: the one place that knows how."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from engine.cache import PagedKVCache
from engine.copies import Copies
from engine.eviction import EvictionPolicy, make_policy
from engine.host_cache import HostCache
from engine.pools import DevicePool, HostPool
from engine.residency import Residency
from engine.retention import Retention
from engine.swap import SwapEngine
from engine.swap_factory import make_swap


def _nothing(*_: object) -> None:
    pass


@dataclass(frozen=True, slots=True)
class Hooks:
    """What the outside hears, each on the thread where it happens."""

    on_problem: Callable[[str, str], None] = _nothing  #: an event and its words: a copy failed, a page did not verify
    on_copied: Callable[[], None] = _nothing  #: a copy completed
    on_death: Callable[[BaseException], None] | None = None  #: a copy thread died, and pages stay pinned for ever
    reached: Callable[[str], None] = _nothing  #: a named point at which a test may end the process


def make_residency(
    device: DevicePool,
    host: HostPool | None = None,
    *,
    prefill_chunk: int,
    eviction: str = "arc",
    durable: bool = False,
    reserve: int = 0,
    retention_seconds: float | None = None,
    clock: Callable[[], float] = time.monotonic,
    hooks: Hooks = Hooks(),
    swap: Callable[..., SwapEngine] = make_swap,
) -> Residency:
    """Without ``host`` nothing is ever copied. ``eviction`` is the policy of both pools: arc, lru or fifo; for
    ``durable`` and ``reserve`` see ``HostCache``; host pages that nobody used for ``retention_seconds`` are zeroed; ``swap`` makes
    what moves the bytes."""
    cache, copies, retention = PagedKVCache(device, host), None, None
    policy: EvictionPolicy[str] = make_policy(eviction, device.manager.total_pages)
    if host is not None:
        host_policy: EvictionPolicy[str] = make_policy(eviction, host.manager.total_pages)
        cached = HostCache(host.manager, host_policy, durable=durable, reserve=reserve, clock=clock)
        mover = swap(device, host, on_completed=hooks.on_copied, on_death=hooks.on_death, reached=hooks.reached)
        copies = Copies(device.manager, cached, host, mover, on_problem=hooks.on_problem)
        if retention_seconds is not None:
            retention = Retention(cached, host, retention_seconds, on_problem=hooks.on_problem)
    return Residency(cache, policy, prefill_chunk=prefill_chunk, copies=copies, retention=retention, reached=hooks.reached)
