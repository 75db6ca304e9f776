"""The baseline: a contiguous KV cache, one buffer of the greatest length for each Sequence. No sharing, no swap, no preemption.

It is the same engine with pages as long as the greatest length, so that only the layout of the memory and its allocation differ:
the model, the kernels, the scheduler and the sampler are the same code. A page table of length one *is* a contiguous buffer:

- one extent ``[layers, 2, max_length, kv_heads, head_dim]`` for each Sequence, as in a static cache: in each layer the keys of all
  its tokens lie in a row, and so do the values;
- taken whole when the Sequence is admitted and given back when it ends: it never grows, so nobody is ever preempted;
- never full (the last token is never fed back), hence never sealed, never copied out, never shared. (Give no two jobs the same
  prompt: they would fork.)

It pays nothing for being a page: a decode step walks each Sequence in one stretch, and a prompt chunk reads the rows that exist,
not the whole buffer.
"""

from benchmarks.harness import Subject, make_budget
from engine.core import Engine


def make_engine(subject: Subject, buffers: int, max_length: int) -> Engine:
    """``buffers`` Sequences at once, each of at most ``max_length`` tokens, prompt and answer."""
    device = subject.pool(buffers, page_size=max_length)
    return subject.engine(subject.residency(device), make_budget(max_running=buffers), max_context=max_length)
