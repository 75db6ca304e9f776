"""The ``Runner`` of a CUDA device."""

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch

from engine.cuda_device import device_facts
from engine.cuda_forward import PagedCall, VarlenAttention, forward, varlen_attention
from engine.cuda_rows import Launcher, RowBucket, Trial, agreeing, captured
from engine.model import LoadedModel
from engine.runner import check_chunk, check_pool, check_rows

Ids = npt.NDArray[np.int64]
Int32s = npt.NDArray[np.int32]

#: Sizes tried; those that agree with the largest are used.
BUCKETS = (8, 16, 32, 64, 128)


class CudaRunner:
    """Prompt chunks one by one, their shapes set by their job; generated rows in buckets (``cuda_rows``), replayed as graphs.

    Everything runs on the calling thread's current stream. Calls return when their logits are on the CPU; calls without logits
    when the work is queued, and ``CudaSwap`` orders its copies after it by events.
    """

    def __init__(
        self,
        model: LoadedModel,
        pool: torch.Tensor,
        page_size: int,
        prefill_chunk: int,
        *,
        buckets: Sequence[int] = BUCKETS,
        attention: VarlenAttention = varlen_attention,
        launcher: Launcher = captured,
    ) -> None:
        """``pool`` is [num_pages, *model.geometry(page_size).page_shape] in the model's dtype, contiguous, on its device.

        Runs the model a few dozen times, over pages of its own, to find the buckets that agree. Raises ``InvalidCall`` for a pool
        that does not fit, ``UnsupportedModel`` for a model that cannot be captured.
        """
        check_pool(model, pool, page_size, prefill_chunk)
        self.model, self.pool, self.page_size, self.prefill_chunk = model, pool, page_size, prefill_chunk
        self._attention, self._launcher = attention, launcher
        candidates = [RowBucket(model, size, page_size, pool.device, attention) for size in sorted(buckets)]
        trial = Trial(model, page_size, candidates[-1].size, pool.device)
        self._buckets = agreeing(candidates, trial)
        self._launch = launcher(self._buckets, pool, trial)

    @property
    def buckets(self) -> tuple[int, ...]:
        """Sizes of the calls of generated rows, smallest first."""
        return tuple(bucket.size for bucket in self._buckets)

    @property
    def device_facts(self) -> Mapping[str, object]:
        return {**device_facts(self.pool.device), "buckets": self.buckets}

    def over(self, pool: torch.Tensor) -> "CudaRunner":
        return CudaRunner(
            self.model,
            pool,
            self.page_size,
            self.prefill_chunk,
            buckets=self.buckets,
            attention=self._attention,
            launcher=self._launcher,
        )

    def run_chunk(self, token_ids: Ids, start: int, page_table: Int32s, store_from: int, want_logits: bool) -> torch.Tensor | None:
        """See ``engine.runner.Runner``."""
        end = check_chunk(self, token_ids, start, page_table)
        call = self._chunk_call(start, end, page_table[: -(-end // self.page_size)], max(start, store_from))
        logits = forward(
            self.model, call, self._to_device(token_ids.astype(np.int64)), self._to_device(np.arange(start, end)), last_rows=1
        )
        return logits[0].float().cpu() if want_logits else None

    def run_rows(
        self, token_ids: Ids, positions: Int32s, page_tables: Int32s, row_sequence: Int32s, logits_rows: Int32s
    ) -> torch.Tensor:
        """See ``engine.runner.Runner``."""
        check_rows(self, token_ids, positions, page_tables, row_sequence)
        largest = self._buckets[-1].size
        # More rows than a call takes: by position, since a row reads what the rows before it in its sequence wrote.
        order = np.argsort(positions, kind="stable") if len(positions) > largest else np.arange(len(positions))
        place = np.argsort(order)[logits_rows]  # where the wanted rows went
        logits = torch.empty(len(logits_rows), self.model.vocab_size)
        for first in range(0, len(order), largest):
            rows = order[first : first + largest]
            computed = self._run_bucket(token_ids[rows], positions[rows], page_tables, row_sequence[rows])
            wanted = np.flatnonzero((place >= first) & (place < first + len(rows)))
            if len(wanted):
                found = computed.index_select(0, self._to_device(place[wanted] - first))
                logits[torch.from_numpy(wanted)] = found.float().cpu()
        return logits

    def _run_bucket(self, token_ids: Ids, positions: Int32s, page_tables: Int32s, row_sequence: Int32s) -> torch.Tensor:
        bucket = next(bucket for bucket in self._buckets if bucket.size >= len(token_ids))
        bucket.fill(token_ids, positions, page_tables, row_sequence)
        return self._launch[bucket.size]()

    def _chunk_call(self, start: int, end: int, page_table: Int32s, store_from: int) -> PagedCall:
        """Rows ``start .. end - 1`` of the sequence in ``page_table``; those from ``store_from`` on are written."""
        stored = np.arange(min(store_from, end), end)
        return PagedCall(
            self.pool,
            page_tables=self._to_device(page_table.astype(np.int32))[None],
            lengths=self._to_device(np.array([end], dtype=np.int32)),
            cu_seq_q=self._to_device(np.array([0, end - start], dtype=np.int32)),
            cu_seq_k=self._to_device(np.array([0, end], dtype=np.int32)),
            max_q=end - start,
            source=self._to_device(stored - start),
            pages=self._to_device(page_table[stored // self.page_size].astype(np.int64)),
            slots=self._to_device(stored % self.page_size),
            attention=self._attention,
        )

    def _to_device(self, array: npt.NDArray[np.int32] | npt.NDArray[np.int64]) -> torch.Tensor:
        return torch.from_numpy(array).to(self.pool.device)
