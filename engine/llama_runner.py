"""The ``Runner`` of Llama-shaped models on the CPU: one call of one kernel computes all generated rows."""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from engine.chunk_attention import causal_attention
from engine.kernels.attention import attend
from engine.kernels.jit import use_threads
from engine.kernels.llama import Rows, begin_layer, compute_logits, embed_rows, end_layer, forward_rows
from engine.llama import LlamaWeights
from engine.model import LoadedModel
from engine.pools import kernel_array
from engine.runner import Ids, Int32s, check_chunk, check_pool, check_rows

_F32 = npt.NDArray[np.float32]


class LlamaRunner:
    """Prompt chunks go through the same kernels layer by layer, with torch's attention between. Made by ``make_runner``."""

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
        model = self.model
        logits = np.empty((len(logits_rows), model.vocab_size), np.float32)
        with model.lock:
            use_threads(model.threads)
            forward_rows(
                np.ascontiguousarray(token_ids, np.int64),
                np.ascontiguousarray(logits_rows, np.int32),
                self._llama.weights,
                self._space.rows(positions, page_tables, row_sequence),
                self._epsilon,
                self._scaling,
                self._pool_array,
                logits,
                model.slot.attention_time,
                model.threads,
            )
        return torch.from_numpy(logits)

    def run_chunk(self, token_ids: Ids, start: int, page_table: Int32s, store_from: int, want_logits: bool) -> torch.Tensor | None:
        """See ``Runner``."""
        end = check_chunk(self, token_ids, start, page_table)
        model, weights, epsilon = self.model, self._llama.weights, self._epsilon
        table = page_table[: -(-end // self.page_size)]
        pages = torch.from_numpy(table.astype(np.int64))
        last = model.num_layers - 1
        with model.lock, torch.inference_mode():
            use_threads(model.threads)
            rows = self._space.rows(np.arange(start, end, dtype=np.int32), table[None], np.zeros(len(token_ids), np.int32))
            embed_rows(np.ascontiguousarray(token_ids, np.int64), weights, rows.hidden)
            for layer in range(model.num_layers):
                begin_layer(layer, weights, rows, epsilon, self._pool_array, store_from, model.threads)
                if layer < last:
                    self._attend_chunk(layer, rows, pages, start, end)
                    end_layer(layer, weights, rows, epsilon, model.threads)
            # Of the last layer nothing is wanted but its keys and values, and one row.
            return self._logits_of_last(last, rows) if want_logits else None

    def _attend_chunk(self, layer: int, rows: Rows, pages: torch.Tensor, start: int, end: int) -> None:
        query = torch.from_numpy(rows.query).view(1, end - start, -1, self.model.head_dim)
        output = causal_attention(self.pool, layer, pages, query.transpose(1, 2), float(self._scaling), start, end)
        torch.from_numpy(rows.attended).view(output.shape).copy_(output)

    def _logits_of_last(self, layer: int, rows: Rows) -> torch.Tensor:
        row = Rows(*(array if name == "page_tables" else array[-1:] for name, array in rows._asdict().items()))
        weights, threads = self._llama.weights, self.model.threads
        query, attended = row.query.reshape(-1), row.attended.reshape(-1)
        heads = query.size // self.model.head_dim
        tables, sequence = row.page_tables, row.row_sequence
        attend(query, heads, self._pool_array, layer, tables, sequence, row.positions, self._scaling, attended, threads)
        end_layer(layer, weights, row, self._epsilon, threads)
        logits = np.empty((1, self.model.vocab_size), np.float32)
        compute_logits(np.zeros(1, np.int32), weights, row, self._epsilon, logits, threads)
        return torch.from_numpy(logits[0])


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
