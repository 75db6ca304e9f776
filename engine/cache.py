"""Page tables: which page holds which tokens of which Sequence."""

import numpy as np
import torch

from engine.page_manager import PageManager
from engine.pools import DevicePool, HostPool


class PagedKVCache:
    """Maps (Sequence, token position) to (page, slot) over a DevicePool, and reads or writes KV through that map."""

    def __init__(self, device: DevicePool, host: HostPool | None = None) -> None:
        self.device = device
        self.host = host
        self.page_size = device.geometry.page_size
        self.page_tables: dict[str, list[int]] = {}

    @property
    def gpu_manager(self) -> PageManager:
        return self.device.manager

    @property
    def cpu_manager(self) -> PageManager:
        if self.host is None:
            raise ValueError("this cache has no host pool")
        return self.host.manager

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def missing_pages(self, sequence_id: str, num_tokens: int) -> int:
        """How many more pages the Sequence needs to hold ``num_tokens`` tokens."""
        return max(0, self.pages_for(num_tokens) - len(self.page_tables.get(sequence_id, ())))

    def slots(self, sequence_id: str, start: int, end: int) -> np.ndarray:
        """Slot mapping, int64 [end - start]: ``page * page_size + slot`` of each token position."""
        positions = np.arange(start, end)
        table = np.asarray(self.page_tables[sequence_id], dtype=np.int64)
        slots: np.ndarray = table[positions // self.page_size] * self.page_size + positions % self.page_size
        return slots

    def table_of(self, sequence_id: str) -> np.ndarray:
        return np.asarray(self.page_tables[sequence_id], dtype=np.int32)

    def tables_of(self, sequence_ids: list[str]) -> np.ndarray:
        """Page tables side by side, int32 [len(ids), longest]; short ones are padded with page 0, which no row reads."""
        tables = [self.page_tables[sequence_id] for sequence_id in sequence_ids]
        out = np.zeros((len(tables), max(map(len, tables), default=0)), dtype=np.int32)
        for row, table in zip(out, tables, strict=True):
            row[: len(table)] = table
        return out

    def gather(self, sequence_id: str, layer: int, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of the first ``num_tokens`` tokens in one layer, each [num_tokens, num_kv_heads, head_dim] (copies)."""
        positions = np.arange(num_tokens)
        pages = torch.from_numpy(np.asarray(self.page_tables[sequence_id])[positions // self.page_size])
        offsets = torch.from_numpy(positions % self.page_size)
        pool = self.device.tensor
        return pool[pages, layer, 0, offsets], pool[pages, layer, 1, offsets]

    def scatter(self, sequence_id: str, layer: int, start: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write keys and values, each [n, num_kv_heads, head_dim], at token positions ``start ..`` of one layer."""
        positions = np.arange(start, start + len(keys))
        pages = torch.from_numpy(np.asarray(self.page_tables[sequence_id])[positions // self.page_size])
        offsets = torch.from_numpy(positions % self.page_size)
        self.device.tensor[pages, layer, 0, offsets] = keys
        self.device.tensor[pages, layer, 1, offsets] = values

    def problems(self) -> list[str]:
        """What is inconsistent between page tables and the device pool, in words."""
        found = self.gpu_manager.problems()
        for sequence_id, table in self.page_tables.items():
            if len(set(table)) != len(table):
                found.append(f"{sequence_id}: a page is twice in its table")
            found += [
                f"{sequence_id}: page {page} is in its table but held by {self.gpu_manager.holders(page)}"
                for page in table
                if sequence_id not in self.gpu_manager.holders(page)
            ]
            held = set(self.gpu_manager.held_by(sequence_id))
            found += [f"{sequence_id}: holds page {page} outside its table" for page in sorted(held - set(table))]
        return found
