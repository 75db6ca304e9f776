"""The ``Runner`` of Llama-shaped models on the CPU: a call is one call of one kernel."""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from engine.kernels.jit import use_threads
from engine.kernels.llama import Rows, forward
from engine.llama import LlamaWeights
from engine.model import LoadedModel
from engine.pools import kernel_array
from engine.runner import Ids, Int32s, check_chunk, check_pool, check_rows

_F32 = npt.NDArray[np.float32]


class LlamaRunner:
    """Chunks and generated rows are computed alike. Made by ``make_runner``."""

    device_facts = None

    def __init__(self, model: LoadedModel, pool: torch.Tensor, page_size: int, prefill_chunk: int) -> None:
        check_pool(model, pool, page_size, prefill_chunk)
        assert model.llama is not None
        self.model, self.pool, self.page_size, self.prefill_chunk = model, pool, page_size, prefill_chunk
        self._llama: LlamaWeights = model.llama
        self._pool_array = kernel_array(pool)
        self._epsilon = np.float32(self._llama.epsilon)
        self._scaling = np.float32(self._llama.scaling)
        self._space = _Space(self._llama, model)

    def over(self, pool: torch.Tensor) -> "LlamaRunner":
        return LlamaRunner(self.model, pool, self.page_size, self.prefill_chunk)

    def run_rows(
        self, token_ids: Ids, positions: Int32s, page_tables: Int32s, row_sequence: Int32s, logits_rows: Int32s
    ) -> torch.Tensor:
        """See ``Runner``."""
        check_rows(self, token_ids, positions, page_tables, row_sequence)
        return self._forward(token_ids, positions, page_tables, row_sequence, logits_rows, 0)

    def run_chunk(self, token_ids: Ids, start: int, page_table: Int32s, store_from: int, want_logits: bool) -> torch.Tensor | None:
        """See ``Runner``."""
        end = check_chunk(self, token_ids, start, page_table)
        positions = np.arange(start, end, dtype=np.int32)
        wanted = np.array([end - start - 1] if want_logits else [], np.int32)
        logits = self._forward(token_ids, positions, page_table[None], np.zeros_like(positions), wanted, store_from)
        return logits[0] if want_logits else None

    def _forward(
        self,
        token_ids: Ids,
        positions: Int32s,
        page_tables: Int32s,
        row_sequence: Int32s,
        wanted: Int32s,
        store_from: int,
    ) -> torch.Tensor:
        model = self.model
        logits = np.empty((len(wanted), model.vocab_size), np.float32)
        with model.lock:
            use_threads(model.threads)
            forward(
                np.ascontiguousarray(token_ids, np.int64),
                np.ascontiguousarray(wanted, np.int32),
                self._llama.weights,
                self._space.rows(positions, page_tables, row_sequence),
                self._epsilon,
                self._scaling,
                self._pool_array,
                store_from,
                logits,
                model.slot.attention_time,
                model.threads,
            )
        return torch.from_numpy(logits)


class _Space:
    """The memory that calls work in, kept between them and as large as the largest was."""

    def __init__(self, llama: LlamaWeights, model: LoadedModel) -> None:
        weights, dim = llama.weights, model.head_dim
        heads = weights.out.shape[2]
        self._widths = {
            "hidden": weights.qkv.shape[2],
            "normed": weights.qkv.shape[2],
            "qkv": heads + 2 * model.num_kv_heads * dim,
            "query": heads,
            "attended": heads,
            "channels": weights.down.shape[2],
        }
        self._cos, self._sin = model.rope_table
        self._arrays: dict[str, _F32] = {}
        self._capacity = 0

    def rows(self, positions: Int32s, page_tables: Int32s, row_sequence: Int32s) -> Rows:
        count = len(positions)
        if count > self._capacity:
            self._arrays = {name: np.empty((count, width), np.float32) for name, width in self._widths.items()}
            self._capacity = count
        arrays: dict[str, Any] = {name: array[:count] for name, array in self._arrays.items()}
        return Rows(
            positions=np.ascontiguousarray(positions, np.int32),
            page_tables=np.ascontiguousarray(page_tables, np.int32),
            row_sequence=np.ascontiguousarray(row_sequence, np.int32),
            cos=self._cos[positions],
            sin=self._sin[positions],
            **arrays,
        )
