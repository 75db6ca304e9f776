"""The shape of a page. Free of torch: the api, the pool file and the bookkeeping need it too."""

import math
from dataclasses import dataclass

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class PageGeometry:
    """What one KV page holds: ``page_size`` token slots, all layers, keys and values.

    A pool is one tensor ``[num_pages, *page_shape]``: page-major, so that a page is one contiguous extent.
    ``dtype`` is one of ``float32``, ``bfloat16``, ``float16``. Raises ``ValueError`` for any other and for sizes below 1.
    """

    num_layers: int
    page_size: int
    num_kv_heads: int
    head_dim: int
    dtype: str

    def __post_init__(self) -> None:
        for field in ("num_layers", "page_size", "num_kv_heads", "head_dim"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field} must be at least 1, not {getattr(self, field)}")
        if self.dtype not in DTYPE_BYTES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPE_BYTES)}, not {self.dtype!r}")

    @property
    def page_shape(self) -> tuple[int, int, int, int, int]:
        """``(num_layers, 2, page_size, num_kv_heads, head_dim)``; index 1 is 0 for keys, 1 for values."""
        return (self.num_layers, 2, self.page_size, self.num_kv_heads, self.head_dim)

    @property
    def page_bytes(self) -> int:
        """Bytes of one page."""
        return math.prod(self.page_shape) * DTYPE_BYTES[self.dtype]

    @property
    def token_bytes(self) -> int:
        """Bytes of KV that one token takes."""
        return self.page_bytes // self.page_size
