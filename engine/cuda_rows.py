"""Generated rows in buckets: calls of a few fixed shapes, whose results are the same for a row in all of them, by test.

On a device no library promises that a matrix product gives a row the same bits whatever the number of rows. It does at equal
shapes. So rows are padded to a bucket, and of the buckets only those are used that agree with the largest.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from engine.cuda_forward import PagedCall, VarlenAttention, forward
from engine.errors import UnsupportedModel
from engine.model import LoadedModel
from engine.pools import DTYPES

Ids = npt.NDArray[np.int64]
Int32s = npt.NDArray[np.int32]

# Columns of a bucket's input; its page table follows. One tensor, so that a step needs one copy to the device.
_TOKEN, _POSITION, _LENGTH, _SOURCE, _PAGE, _SLOT, _TABLE = range(7)
_WARM_UPS = 2


class RowBucket:
    """A call of ``size`` rows, each a sequence of its own with one query. Its input lies in one place, as a CUDA graph needs it.

    Rows that are missing repeat the first: they see the first slot of its sequence, and what they write is its key and value,
    into its slot, once more. So they touch no page that the call does not write anyway, and no bit of it depends on them.
    """

    def __init__(self, model: LoadedModel, size: int, page_size: int, device: torch.device, attention: VarlenAttention) -> None:
        self.size = size
        self._model, self._page_size, self._attention = model, page_size, attention
        # As wide as the longest context: a graph's shapes are fixed, and the width is no part of a row's bits.
        self._max_pages = -(-model.max_context // page_size)
        self.inputs = torch.zeros(size, _TABLE + self._max_pages, dtype=torch.int32, device=device)
        self._cu_seq_q = torch.arange(size + 1, dtype=torch.int32, device=device)
        self._cu_seq_k = self._cu_seq_q * (self._max_pages * page_size)

    def fill(self, token_ids: Ids, positions: Int32s, page_tables: Int32s, row_sequence: Int32s) -> None:
        """Rows of the next call: at most ``size``; arguments as in ``Runner.run_rows``."""
        count = len(token_ids)
        rows = np.zeros(self.inputs.shape, dtype=np.int32)
        rows[:count, _TOKEN] = token_ids
        rows[:count, _POSITION] = positions
        rows[:count, _LENGTH] = positions + 1
        rows[:count, _SOURCE] = np.arange(count)
        rows[:count, _PAGE] = page_tables[row_sequence, positions // self._page_size]
        rows[:count, _SLOT] = positions % self._page_size
        tables = page_tables[row_sequence, : self._max_pages]
        rows[:count, _TABLE : _TABLE + tables.shape[1]] = tables
        rows[count:] = rows[0]
        rows[count:, _LENGTH] = 1
        # In order with the computation, and done with `rows` when it returns.
        self.inputs.copy_(torch.from_numpy(rows))

    def compute(self, pool: torch.Tensor) -> torch.Tensor:
        """Logits [size, vocab_size] of the rows last filled in; their keys and values go into ``pool``."""
        column = self.inputs.unbind(1)
        call = PagedCall(
            pool,
            page_tables=self.inputs[:, _TABLE:].contiguous(),
            lengths=column[_LENGTH].contiguous(),
            cu_seq_q=self._cu_seq_q,
            cu_seq_k=self._cu_seq_k,
            max_q=1,
            source=column[_SOURCE].long(),
            pages=column[_PAGE].long(),
            slots=column[_SLOT].long(),
            attention=self._attention,
        )
        return forward(self._model, call, column[_TOKEN].long(), column[_POSITION].long(), last_rows=0)


class Trial:
    """One made-up sequence as long as the largest bucket, in pages of its own."""

    def __init__(self, model: LoadedModel, page_size: int, length: int, device: torch.device) -> None:
        num_pages = -(-length // page_size)
        self.pool = torch.zeros(num_pages, *model.geometry(page_size).page_shape, dtype=DTYPES[model.kv_dtype], device=device)
        self._table = np.arange(num_pages, dtype=np.int32)[None]
        self._tokens = np.random.default_rng(0).integers(0, model.vocab_size, length)
        self._length = length

    def fill(self, bucket: RowBucket, start: int) -> int:
        """The sequence's next rows from ``start`` on, as many as fit; how many."""
        positions = np.arange(start, min(start + bucket.size, self._length), dtype=np.int32)
        bucket.fill(self._tokens[positions], positions, self._table, np.zeros_like(positions))
        return len(positions)

    def replay(self, bucket: RowBucket) -> tuple[torch.Tensor, torch.Tensor]:
        """All rows through ``bucket``: logits [length, vocab_size], and the pages as they are then."""
        self.pool.zero_()
        logits, start = [], 0
        while start < self._length:
            count = self.fill(bucket, start)
            logits.append(bucket.compute(self.pool)[:count].clone())
            start += count
        return torch.cat(logits), self.pool.clone()


def agreeing(buckets: Sequence[RowBucket], trial: Trial) -> list[RowBucket]:
    """Those of ``buckets`` that give every row of the trial the logits, keys and values that the last one gives it, ``==``."""
    *smaller, largest = buckets
    logits, pages = trial.replay(largest)

    def agrees(bucket: RowBucket) -> bool:
        its_logits, its_pages = trial.replay(bucket)
        return torch.equal(its_logits, logits) and torch.equal(its_pages, pages)

    return [*filter(agrees, smaller), largest]


#: Computes the rows that were filled into a bucket, over the pool it was made for; logits as ``RowBucket.compute``, good until the
#: next call of any.
Launch = Callable[[], torch.Tensor]
Launcher = Callable[[Sequence[RowBucket], torch.Tensor, Trial], Mapping[int, Launch]]


def eager(buckets: Sequence[RowBucket], pool: torch.Tensor, trial: Trial) -> Mapping[int, Launch]:
    """Kernel after kernel: for calls too few to be worth a capture, and where there are no graphs."""
    return {bucket.size: partial(bucket.compute, pool) for bucket in buckets}


def captured(buckets: Sequence[RowBucket], pool: torch.Tensor, trial: Trial) -> Mapping[int, Launch]:
    """One CUDA graph for each bucket: a decode step is hundreds of kernels too short to be launched one by one.

    Capturing computes nothing; the runs before it, which load kernels and set up cuBLAS, go over the trial's pages. Other
    threads may use the device meanwhile. Raises ``UnsupportedModel`` for a model that asks the device for a number while it
    computes.
    """
    with torch.cuda.device(pool.device):
        memory = torch.cuda.graph_pool_handle()  # shared: one graph runs at a time, and only its logits outlast it
        launches = {}
        for bucket in sorted(buckets, key=lambda bucket: -bucket.size):
            _warm_up(bucket, trial)
            launches[bucket.size] = _capture(bucket, pool, memory)
    return launches


def _warm_up(bucket: RowBucket, trial: Trial) -> None:
    trial.fill(bucket, 0)
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(_WARM_UPS):
            bucket.compute(trial.pool)
    torch.cuda.current_stream().wait_stream(stream)


def _capture(bucket: RowBucket, pool: torch.Tensor, memory: Any) -> Launch:
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, pool=memory, capture_error_mode="thread_local"):
            logits = bucket.compute(pool)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise UnsupportedModel(
            f"no CUDA graph of a step could be captured: {error}",
            "models whose code waits for the device are served on the cpu",
            field="graph",
        ) from error

    def launch() -> torch.Tensor:
        graph.replay()
        return logits

    return launch
