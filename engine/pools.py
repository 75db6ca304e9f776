"""Where pages live: on the compute device, and in host memory behind a backing.

Both pools have the shape ``[num_pages, num_layers, 2, page_size, num_kv_heads, head_dim]``, page-major: one page is one contiguous
extent with all layers, so one copy moves it and one checksum covers it.
"""

from typing import Protocol

import numpy as np
import torch

from engine.geometry import PageGeometry
from engine.page_manager import PageManager

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


class PageBacking(Protocol):
    """Bytes of host pages. ``storage.pool_file.PoolFile`` is one; ``MemoryBacking`` another."""

    def write_page(self, page: int, data: np.ndarray) -> int:
        """Store ``data`` (uint8, page_bytes) and return its checksum."""

    def read_page(self, page: int, out: np.ndarray) -> int:
        """Fill ``out`` (uint8, page_bytes) and return the checksum of what was read."""


class MemoryBacking:
    """Plain memory, for an engine without a pool file. Nothing survives it, so nothing needs a checksum: it answers 0."""

    def __init__(self, num_pages: int, page_bytes: int) -> None:
        self._pages = np.zeros((num_pages, page_bytes), dtype=np.uint8)

    def write_page(self, page: int, data: np.ndarray) -> int:
        self._pages[page] = data
        return 0

    def read_page(self, page: int, out: np.ndarray) -> int:
        out[:] = self._pages[page]
        return 0


class DevicePool:
    """Pages on the compute device: ``tensor`` has shape [num_pages, num_layers, 2, page_size, num_kv_heads, head_dim]."""

    def __init__(self, num_pages: int, geometry: PageGeometry, device: str = "cpu") -> None:
        self.geometry = geometry
        self.device = device
        self.manager = PageManager(num_pages)
        # Zeros, not empty: a NaN left in a slot that no row reads yet would still poison a masked SDPA.
        self.tensor = torch.zeros((num_pages, *geometry.page_shape), dtype=DTYPES[geometry.dtype], device=device)

    def page_bytes_of(self, page: int) -> np.ndarray:
        """The bytes of one page, uint8 [page_bytes]; a view for CPU memory, so a write into it changes the page."""
        return self.tensor[page].view(torch.uint8).reshape(-1).numpy() if self.device == "cpu" else self._staged(page)

    def _staged(self, page: int) -> np.ndarray:
        torch.cuda.current_stream().synchronize()
        return self.tensor[page].to("cpu").view(torch.uint8).reshape(-1).numpy()

    def load_page(self, page: int, data: np.ndarray) -> None:
        """Overwrite one page with ``data``, uint8 [page_bytes], already verified."""
        self.tensor[page].view(torch.uint8).reshape(-1).copy_(torch.from_numpy(data))


class HostPool:
    """Pages in host memory: ids here, bytes in the backing."""

    def __init__(self, num_pages: int, geometry: PageGeometry, backing: PageBacking) -> None:
        self.geometry = geometry
        self.manager = PageManager(num_pages)
        self.backing = backing
