"""The ``Runner`` of any model on the CPU."""

from typing import Any

import numpy as np
import torch

from engine.calls import ChunkCall, RowsCall
from engine.errors import InvalidCall
from engine.kernels.jit import use_threads
from engine.model import LoadedModel
from engine.pools import kernel_array
from engine.rowwise import functional_rows
from engine.runner import Ids, Int32s, check_chunk, check_pool, check_rows


class ModelRunner:
    """transformers' own modules, with our linear layers, activations and attention in them."""

    device_facts = None

    def __init__(self, model: LoadedModel, pool: torch.Tensor, page_size: int, prefill_chunk: int) -> None:
        """``pool`` is [num_pages, *model.geometry(page_size).page_shape], contiguous, on the CPU; ``prefill_chunk`` the most rows
        of a chunk."""
        check_pool(model, pool, page_size, prefill_chunk)
        if pool.device.type != "cpu":
            raise InvalidCall(f"the pool is on {pool.device}, not on the cpu")
        self.model, self.pool, self.page_size, self.prefill_chunk = model, pool, page_size, prefill_chunk
        self._pool_array = kernel_array(pool)

    def over(self, pool: torch.Tensor) -> "ModelRunner":
        return ModelRunner(self.model, pool, self.page_size, self.prefill_chunk)

    def run_chunk(self, token_ids: Ids, start: int, page_table: Int32s, store_from: int, want_logits: bool) -> torch.Tensor | None:
        """See ``Runner``."""
        end = check_chunk(self, token_ids, start, page_table)
        pages = torch.from_numpy(page_table[: -(-end // self.page_size)].astype(np.int64))
        call = ChunkCall(self.pool, self.page_size, pages, start, store_from)
        rows = torch.tensor([len(token_ids) - 1]) if want_logits else None
        logits = self._forward(call, token_ids, np.arange(start, end, dtype=np.int64), rows)
        return None if logits is None else logits[0]

    def run_rows(
        self, token_ids: Ids, positions: Int32s, page_tables: Int32s, row_sequence: Int32s, logits_rows: Int32s
    ) -> torch.Tensor:
        """See ``Runner``."""
        check_rows(self, token_ids, positions, page_tables, row_sequence)
        call = RowsCall(
            self._pool_array,
            np.ascontiguousarray(page_tables, np.int32),
            np.ascontiguousarray(row_sequence, np.int32),
            np.ascontiguousarray(positions, np.int32),
            self.model.threads,
        )
        rows = torch.from_numpy(logits_rows.astype(np.int64)) if len(logits_rows) else None
        logits = self._forward(call, token_ids, positions.astype(np.int64), rows)
        return torch.empty(0, self.model.vocab_size) if logits is None else logits

    def _forward(
        self, call: ChunkCall | RowsCall, token_ids: Ids, positions: Ids, rows: torch.Tensor | None
    ) -> torch.Tensor | None:
        model = self.model
        inputs: dict[str, Any] = {
            "input_ids": torch.from_numpy(token_ids.astype(np.int64))[None],
            "position_ids": torch.from_numpy(positions)[None],
            "use_cache": False,
        }
        with model.lock, torch.inference_mode(), functional_rows(model.functional_rows if isinstance(call, RowsCall) else None):
            use_threads(model.threads)
            model.slot.call = call
            try:
                if rows is None:
                    model.module.base_model(**inputs)
                    return None
                logits: torch.Tensor = model.module(**inputs, logits_to_keep=rows).logits[0]
            finally:
                model.slot.call = None
        return logits
