"""What a model is computing right now: the runner says it here, attention and the row-wise layers read it."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch


@dataclass(frozen=True)
class ChunkCall:
    """A prompt chunk of one sequence: rows ``start .. start + n - 1``; rows at positions below ``store_from`` are in their
    pages already."""

    pool: torch.Tensor
    page_size: int
    pages: torch.Tensor
    """int64: the pages of positions 0 .. end, in order."""
    start: int
    store_from: int


@dataclass(frozen=True)
class RowsCall:
    """Generated rows of any sequences, packed; arguments of ``attend_rows``."""

    pool: npt.NDArray[Any]
    page_tables: npt.NDArray[np.int32]
    row_sequence: npt.NDArray[np.int32]
    positions: npt.NDArray[np.int32]
    threads: int


class DeviceCall(ABC):
    """Rows on an accelerator, chunk or generated; ``cuda_forward`` has the one there is. It attends for itself, so that nothing of
    CUDA is loaded where there is none."""

    @abstractmethod
    def attend(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
        """Shapes as in ``paged_attention``."""


@dataclass
class ObserveCall:
    """Plain causal attention over the call's own rows, noting what each layer hands over; for the checks at load."""

    layers: list[int] = field(default_factory=list)
    shapes: list[tuple[int, int, int]] = field(default_factory=list)
    """Per layer: number of kv heads, head dim of keys, head dim of values."""
    windows: list[int | None] = field(default_factory=list)


class CallSlot:
    """What the model is computing right now; ``None`` between calls and while transformers' own attention runs.

    ``threads`` is the number of threads of the row kernels; ``attention_time`` [1] grows by the nanoseconds that attention took.
    Not on an accelerator, where a call returns before its work is done.
    """

    __slots__ = ("attention_time", "call", "threads")

    def __init__(self, threads: int) -> None:
        self.call: ChunkCall | RowsCall | DeviceCall | ObserveCall | None = None
        self.threads = threads
        self.attention_time = np.zeros(1, np.int64)

    @property
    def attention_seconds(self) -> float:
        return float(self.attention_time[0]) * 1e-9
