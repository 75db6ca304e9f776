"""Where pages live: on the compute device, and in host memory behind a backing.

Both pools have the shape ``[num_pages, num_layers, 2, page_size, num_kv_heads, head_dim]``, page-major: one page is one contiguous
extent with all layers, so one copy moves it and one checksum covers it.
"""

import math
import mmap
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from engine import pool_memory
from engine.geometry import PageGeometry
from engine.page_manager import PageManager

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
PageBytes = npt.NDArray[np.uint8]


def kernel_array(tensor: torch.Tensor) -> npt.NDArray[Any]:
    """The same memory as kernels take it (``kernels.vector``): float32 as it is, bfloat16 as uint16, float16 as int16."""
    if tensor.dtype == torch.float32:
        return tensor.numpy()
    array = tensor.view(torch.int16).numpy()
    return array.view(np.uint16) if tensor.dtype == torch.bfloat16 else array


class PageBacking(Protocol):
    """Bytes of host pages. ``storage.pool_file.PoolFile`` is one; ``MemoryBacking`` another.

    Calls on different pages may run in different threads. What fails raises OSError; then nothing is known of these pages.
    """

    @property
    def poisoned(self) -> bool:
        """Nothing more should be written: what reached the disk is unknown."""

    def write_pages(self, first: int, data: PageBytes) -> list[int]:
        """Store ``data`` (uint8, whole pages) in neighbouring pages from ``first`` on; the checksum of each as it then stands."""

    def read_pages(self, first: int, out: PageBytes) -> list[int]:
        """Fill ``out`` (uint8, whole pages) from neighbouring pages; the checksum of each as it was read."""

    def zero_page(self, page: int) -> None:
        """Leave nothing of what the page held."""

    def sync(self, pages: Sequence[int]) -> None:
        """Bring pages to the disk."""


class MemoryBacking:
    """Plain memory, for an engine without a pool file. Nothing survives it, so nothing needs a checksum: it answers 0."""

    poisoned = False

    def __init__(self, num_pages: int, page_bytes: int) -> None:
        self.pages = np.zeros((num_pages, page_bytes), dtype=np.uint8)

    def write_pages(self, first: int, data: PageBytes) -> list[int]:
        extent = self._extent(first, data)
        np.copyto(extent.reshape(-1), data)
        return [0] * len(extent)

    def read_pages(self, first: int, out: PageBytes) -> list[int]:
        extent = self._extent(first, out)
        np.copyto(out, extent.reshape(-1))
        return [0] * len(extent)

    def zero_page(self, page: int) -> None:
        self.pages[page] = 0

    def sync(self, pages: Sequence[int]) -> None:
        pass

    def _extent(self, first: int, data: PageBytes) -> PageBytes:
        return self.pages[first : first + data.size // self.pages.shape[1]]


class DevicePool:
    """Pages on the compute device: ``tensor`` has shape [num_pages, num_layers, 2, page_size, num_kv_heads, head_dim]."""

    def __init__(self, num_pages: int, geometry: PageGeometry, device: str = "cpu", *, memory: mmap.mmap | None = None) -> None:
        """``memory``: of the pool of a process that died (``pool_memory``), for one on the CPU; used if it has the right size."""
        self.geometry = geometry
        self.device = device
        self.manager = PageManager(num_pages)
        shape, dtype = (num_pages, *geometry.page_shape), DTYPES[geometry.dtype]
        self._memory = None
        if device == "cpu":
            size = math.prod(shape) * dtype.itemsize
            # Its bytes do not matter: no kernel reads a slot before it was written (tests of exactness begin with NaN everywhere).
            self._memory = memory if memory is not None and len(memory) == size else pool_memory.make(size)
            self.tensor = torch.frombuffer(self._memory, dtype=dtype).view(shape)
        else:
            # Zeros, not empty: a NaN left in a slot that no row reads yet would still poison a masked SDPA.
            self.tensor = torch.zeros(shape, dtype=dtype, device=device)
        #: the same memory as bytes, uint8 [num_pages, page_bytes]
        self.bytes = self.tensor.view(num_pages, -1).view(torch.uint8)

    def copy_page(self, source: int, target: int) -> None:
        """Copy one page onto another, in order with the computation."""
        self.tensor[target].copy_(self.tensor[source])

    def claim_memory(self) -> None:
        """See ``pool_memory.claim``."""
        if self._memory is not None:
            pool_memory.claim(self._memory)


class HostPool:
    """Pages in host memory: ids here, bytes in the backing. ``sync``: pages reach the disk before they count as stored."""

    def __init__(self, num_pages: int, geometry: PageGeometry, backing: PageBacking, *, sync: bool = False) -> None:
        self.geometry = geometry
        self.manager = PageManager(num_pages)
        self.backing = backing
        self.sync = sync
