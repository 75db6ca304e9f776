"""Which ``SwapEngine`` a device pool has."""

from collections.abc import Callable

from engine.pools import DevicePool, HostPool
from engine.swap import SwapEngine, ThreadSwap


def make_swap(
    device: DevicePool,
    host: HostPool,
    *,
    on_completed: Callable[[], None] = lambda: None,
    on_death: Callable[[BaseException], None] | None = None,
    reached: Callable[[str], None] = lambda point: None,
) -> SwapEngine:
    """A ``ThreadSwap`` for a pool in plain memory, a ``CudaSwap`` for one on a CUDA device; arguments are theirs."""
    if device.bytes.device.type == "cpu":
        return ThreadSwap(device, host, on_completed=on_completed, on_death=on_death, reached=reached)
    from engine.cuda_swap import CudaSwap

    return CudaSwap(device, host, on_completed=on_completed, on_death=on_death, reached=reached)
