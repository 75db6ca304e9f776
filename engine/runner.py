"""Runs a model over pages: prompt chunks of one sequence, or generated rows of many."""

from collections.abc import Mapping
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from engine.errors import InvalidCall
from engine.model import LoadedModel
from engine.pools import DTYPES

Ids = npt.NDArray[np.int64]
Int32s = npt.NDArray[np.int32]


class Runner(Protocol):
    """Computes logits and fills pages. Knows nothing of jobs, and keeps nothing between calls but its pool.

    The bits of a row depend on its own sequence alone: a chunk's call shape is set by its job, and generated rows are computed
    in a way that gives a row the same result in any company. So replaying, restoring and moving pages change nothing
    (`DESIGN.md`). Call it from one thread at a time.
    """

    @property
    def model(self) -> LoadedModel: ...
    @property
    def pool(self) -> torch.Tensor:
        """[num_pages, *model.geometry(page_size).page_shape]."""

    @property
    def page_size(self) -> int: ...
    @property
    def prefill_chunk(self) -> int:
        """The most rows of a chunk."""

    @property
    def device_facts(self) -> Mapping[str, object] | None:
        """What of the device may change bits, for ``exactness.arithmetic_fingerprint``; None on the CPU, which it knows."""

    def over(self, pool: torch.Tensor) -> "Runner":
        """The same arithmetic over other pages."""

    def run_chunk(self, token_ids: Ids, start: int, page_table: Int32s, store_from: int, want_logits: bool) -> torch.Tensor | None:
        """Compute rows ``start .. start + n - 1`` of one sequence's prompt, and write their keys and values into its pages.

        ``token_ids`` int64 [n], n ≤ ``prefill_chunk``; ``page_table`` int32: the sequence's pages in token order, covering all
        rows up to the last. Positions below ``start`` must be in their pages. Rows below ``store_from`` are in theirs too and
        are not written (a sealed page may be shared). Returns float32 logits [vocab_size] of the last row, on the CPU, if
        wanted. Raises ``InvalidCall``.
        """

    def run_rows(
        self, token_ids: Ids, positions: Int32s, page_tables: Int32s, row_sequence: Int32s, logits_rows: Int32s
    ) -> torch.Tensor:
        """Compute N generated rows of any sequences; several rows of one sequence are a teacher-forced replay.

        ``token_ids`` int64 [N], ``positions`` int32 [N], ``page_tables`` int32 [S, max_pages], ``row_sequence`` int32 [N]
        (index into page_tables), ``logits_rows`` int32 [M]: which rows' logits to return, float32 [M, vocab_size] on the CPU. A
        row sees its sequence's positions up to its own: those in the pages and those of this call. Raises ``InvalidCall``.
        """


def make_runner(model: LoadedModel, pool: torch.Tensor, page_size: int, prefill_chunk: int) -> Runner:
    """The runner for the device where ``pool`` is. Raises ``InvalidCall`` for a page size that the device's attention refuses."""
    if model.llama is not None:
        from engine.llama_runner import LlamaRunner

        return LlamaRunner(model, pool, page_size, prefill_chunk)
    if pool.device.type == "cpu":
        from engine.module_runner import ModelRunner

        return ModelRunner(model, pool, page_size, prefill_chunk)
    from engine.cuda_device import check_page_size
    from engine.cuda_runner import CudaRunner

    check_page_size(page_size)
    return CudaRunner(model, pool, page_size, prefill_chunk)


def check_pool(model: LoadedModel, pool: torch.Tensor, page_size: int, prefill_chunk: int) -> None:
    """Raise ``InvalidCall`` unless ``pool`` holds contiguous pages of ``model``."""
    shape, dtype = model.geometry(page_size).page_shape, DTYPES[model.kv_dtype]
    if tuple(pool.shape[1:]) != shape or pool.dtype != dtype or not pool.is_contiguous():
        raise InvalidCall(f"the pool must be contiguous {dtype} [num_pages, *{list(shape)}], not {pool.dtype} {list(pool.shape)}")
    if prefill_chunk < 1:
        raise InvalidCall(f"prefill_chunk must be at least 1, not {prefill_chunk}")


def check_chunk(runner: Runner, token_ids: Ids, start: int, page_table: Int32s) -> int:
    """The position after the chunk's last. Raises ``InvalidCall`` before anything is written."""
    end = start + len(token_ids)
    num_pages = -(-end // runner.page_size)
    if not 1 <= len(token_ids) <= runner.prefill_chunk or start < 0:
        raise InvalidCall(f"a chunk has 1 to {runner.prefill_chunk} rows from position 0 on, not {len(token_ids)} from {start}")
    if end > runner.model.max_context:
        raise InvalidCall(f"position {end - 1} is beyond the context of {runner.model.max_context}")
    if len(page_table) < num_pages:
        raise InvalidCall(f"{end} rows need {num_pages} pages of {runner.page_size}, not {len(page_table)}")
    _check_ids(runner, page_table[:num_pages], token_ids)
    return end


def check_rows(runner: Runner, token_ids: Ids, positions: Int32s, page_tables: Int32s, row_sequence: Int32s) -> None:
    """Raise ``InvalidCall`` for rows that do not fit together, before anything is written."""
    if not len(token_ids) == len(positions) == len(row_sequence) or not len(token_ids):
        raise InvalidCall(f"{len(token_ids)} tokens, {len(positions)} positions and {len(row_sequence)} sequences do not make rows")
    if positions.min() < 0 or positions.max() >= min(runner.model.max_context, page_tables.shape[1] * runner.page_size):
        raise InvalidCall(f"positions {positions.min()} to {positions.max()} are beyond the context or the page tables")
    if row_sequence.min() < 0 or row_sequence.max() >= len(page_tables):
        raise InvalidCall("a row's sequence has no page table")
    _check_ids(runner, page_tables[row_sequence, positions // runner.page_size], token_ids)


def _check_ids(runner: Runner, pages: Int32s, token_ids: Ids) -> None:
    # Kernels write where they are told: a wrong id here would be another job's text, or a crash.
    if pages.min() < 0 or pages.max() >= len(runner.pool):
        raise InvalidCall(f"pages {pages.min()} to {pages.max()} are not all in a pool of {len(runner.pool)}")
    vocab_size = runner.model.vocab_size
    if token_ids.min() < 0 or token_ids.max() >= vocab_size:
        raise InvalidCall(f"token ids {token_ids.min()} to {token_ids.max()} are not all in a vocabulary of {vocab_size}")
