"""The baseline: a contiguous KV cache, one buffer of the greatest length for each Sequence. No sharing, no swap, no preemption.

It is the same engine with pages as long as the greatest length, so that only the layout of the memory and its allocation differ:
the model, the kernels, the scheduler and the sampler are the same code. A page table of length one *is* a contiguous buffer:

- one extent ``[layers, 2, max_length, kv_heads, head_dim]`` for each Sequence, as in a static cache: in each layer the keys of all
  its tokens lie in a row, and so do the values;
- taken whole when the Sequence is admitted and given back when it ends: it never grows, so nobody is ever preempted;
- never full (the last token is never fed back), hence never sealed, never copied out, never shared. (Give no two jobs the same
  prompt: they would fork.)

It pays nothing for being a page: a decode step walks each Sequence in one stretch, and a prompt chunk gathers the rows that exist,
not the whole buffer (``ContiguousRunner``).
"""

import numpy as np
import torch

from benchmarks.harness import CHUNK, Subject, make_budget
from engine.calls import ChunkCall
from engine.core import Engine
from engine.module_runner import ModelRunner
from engine.runner import Ids, Int32s, check_chunk


class ContiguousRunner(ModelRunner):
    """A ``ModelRunner`` over buffers, each of them one page of the greatest length."""

    def run_chunk(self, token_ids: Ids, start: int, page_table: Int32s, store_from: int, want_logits: bool) -> torch.Tensor | None:
        """See ``Runner``. The pool is cut to the rows up to ``end``: attention copies what it is given."""
        end = check_chunk(self, token_ids, start, page_table)
        buffer = torch.from_numpy(page_table[:1].astype(np.int64))
        call = ChunkCall(self.pool[:, :, :, :end], end, buffer, start, store_from)
        rows = torch.tensor([len(token_ids) - 1]) if want_logits else None
        logits = self._forward(call, token_ids, np.arange(start, end, dtype=np.int64), rows)
        return None if logits is None else logits[0]


def make_engine(subject: Subject, buffers: int, max_length: int) -> Engine:
    """``buffers`` Sequences at once, each of at most ``max_length`` tokens, prompt and answer."""
    device = subject.pool(buffers, page_size=max_length)
    runner = ContiguousRunner(subject.model, device.tensor, max_length, CHUNK)
    return subject.engine(subject.residency(device), make_budget(max_running=buffers), runner, max_context=max_length)
