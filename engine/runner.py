"""Runs a model over pages: prompt chunks of one sequence, or generated rows of many."""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from engine.attention import ChunkCall, RowsCall
from engine.errors import InvalidCall
from engine.kernels.jit import use_threads
from engine.model import LoadedModel
from engine.rowwise import functional_rows

Ids = npt.NDArray[np.int64]
Int32s = npt.NDArray[np.int32]


class ModelRunner:
    """Computes logits and fills pages. Knows nothing of jobs, and keeps nothing between calls but its pool.

    The bits of a row depend on its own sequence alone: a chunk's call shape is set by its job, and generated rows go through
    kernels that give a row the same result in any company. So replaying, restoring and moving pages change nothing
    (`DESIGN.md`). Call it from one thread at a time; that thread's OpenMP pool does the work.
    """

    def __init__(self, model: LoadedModel, pool: torch.Tensor, page_size: int, prefill_chunk: int) -> None:
        """``pool`` is [num_pages, *model.geometry(page_size).page_shape], float32, contiguous, on the CPU; ``prefill_chunk``
        the most rows of a chunk."""
        shape = model.geometry(page_size).page_shape
        if tuple(pool.shape[1:]) != shape or pool.dtype != torch.float32 or not pool.is_contiguous() or pool.device.type != "cpu":
            raise InvalidCall(
                f"the pool must be contiguous float32 [num_pages, *{list(shape)}], not {pool.dtype} {list(pool.shape)}"
            )
        if prefill_chunk < 1:
            raise InvalidCall(f"prefill_chunk must be at least 1, not {prefill_chunk}")
        self.model, self.pool, self.page_size, self.prefill_chunk = model, pool, page_size, prefill_chunk
        self._pool_array = pool.numpy()

    def run_chunk(self, token_ids: Ids, start: int, page_table: Int32s, store_from: int, want_logits: bool) -> torch.Tensor | None:
        """Compute rows ``start .. start + n - 1`` of one sequence's prompt, and write their keys and values into its pages.

        ``token_ids`` int64 [n], n ≤ ``prefill_chunk``; ``page_table`` int32: the sequence's pages in token order, covering all
        rows up to the last. Positions below ``start`` must be in their pages. Rows below ``store_from`` are in theirs too and
        are not written (a sealed page may be shared). Returns float32 logits [vocab_size] of the last row if wanted. Raises
        ``InvalidCall``.
        """
        end = start + len(token_ids)
        num_pages = -(-end // self.page_size)
        if not 1 <= len(token_ids) <= self.prefill_chunk or start < 0:
            raise InvalidCall(f"a chunk has 1 to {self.prefill_chunk} rows from position 0 on, not {len(token_ids)} from {start}")
        if end > self.model.max_context:
            raise InvalidCall(f"position {end - 1} is beyond the context of {self.model.max_context}")
        if len(page_table) < num_pages:
            raise InvalidCall(f"{end} rows need {num_pages} pages of {self.page_size}, not {len(page_table)}")
        pages = torch.from_numpy(page_table[:num_pages].astype(np.int64))
        self._check_pages(page_table[:num_pages])
        call = ChunkCall(self.pool, self.page_size, pages, start, store_from)
        rows = torch.tensor([len(token_ids) - 1]) if want_logits else None
        logits = self._forward(call, token_ids, np.arange(start, end, dtype=np.int64), rows)
        return None if logits is None else logits[0]

    def run_rows(
        self, token_ids: Ids, positions: Int32s, page_tables: Int32s, row_sequence: Int32s, logits_rows: Int32s
    ) -> torch.Tensor:
        """Compute N generated rows of any sequences; several rows of one sequence are a teacher-forced replay.

        ``token_ids`` int64 [N], ``positions`` int32 [N], ``page_tables`` int32 [S, max_pages], ``row_sequence`` int32 [N]
        (index into page_tables), ``logits_rows`` int32 [M]: which rows' logits to return, float32 [M, vocab_size]. A row sees
        its sequence's positions up to its own: those in the pages and those of this call. Raises ``InvalidCall``.
        """
        if not len(token_ids) == len(positions) == len(row_sequence) or not len(token_ids):
            raise InvalidCall(
                f"{len(token_ids)} tokens, {len(positions)} positions and {len(row_sequence)} sequences do not make rows"
            )
        if positions.min() < 0 or positions.max() >= min(self.model.max_context, page_tables.shape[1] * self.page_size):
            raise InvalidCall(f"positions {positions.min()} to {positions.max()} are beyond the context or the page tables")
        if row_sequence.min() < 0 or row_sequence.max() >= len(page_tables):
            raise InvalidCall("a row's sequence has no page table")
        self._check_pages(page_tables[row_sequence, positions // self.page_size])
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

    def _check_pages(self, pages: Int32s) -> None:
        # The kernels write where they are told: a wrong id here would be another job's text, or a crash.
        if pages.min() < 0 or pages.max() >= len(self.pool):
            raise InvalidCall(f"pages {pages.min()} to {pages.max()} are not all in a pool of {len(self.pool)}")

    def _forward(
        self, call: ChunkCall | RowsCall, token_ids: Ids, positions: Ids, rows: torch.Tensor | None
    ) -> torch.Tensor | None:
        model = self.model
        if token_ids.min() < 0 or token_ids.max() >= model.vocab_size:
            raise InvalidCall(f"token ids {token_ids.min()} to {token_ids.max()} are not all in a vocabulary of {model.vocab_size}")
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
