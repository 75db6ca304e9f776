"""llama.cpp: GGUF file, threads. A context for each request, made before the clock starts; each sequence has its own cache.

Straight on the C interface (``llama_decode``), since the binding's own ``generate`` knows one sequence only.
"""

import ctypes
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import llama_cpp as llama  # type: ignore[import-not-found]
import numpy as np

from benchmarks.peers.protocol import Message, Prompts, serve, timed

_LENGTH_STEP = 256  #: llama.cpp rounds the slots of a sequence up to this


class Context:
    """Slots for ``sequences`` sequences of ``length`` tokens."""

    def __init__(self, model: Any, threads: int, sequences: int, length: int) -> None:
        settings = llama.llama_context_default_params()
        settings.n_ctx = sequences * -(-length // _LENGTH_STEP) * _LENGTH_STEP
        settings.n_seq_max = sequences
        settings.n_threads = settings.n_threads_batch = threads
        self._vocab_size = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(model))
        self._max_rows = settings.n_batch
        self._context = llama.llama_init_from_model(model, settings)
        if not self._context:
            raise RuntimeError(f"llama.cpp made no context of {settings.n_ctx} slots")
        self._batch = llama.llama_batch_init(self._max_rows, 0, 1)

    def close(self) -> None:
        llama.llama_batch_free(self._batch)
        llama.llama_free(self._context)

    def prefill(self, prompts: Prompts) -> list[int]:
        """The next token of each prompt. Prompts share calls, of as many rows as one takes."""
        rows = [
            (token, position, sequence, position == len(prompt) - 1)
            for sequence, prompt in enumerate(prompts)
            for position, token in enumerate(prompt)
        ]
        found: list[int] = []
        for first in range(0, len(rows), self._max_rows):
            found += self._compute(rows[first : first + self._max_rows])
        return found

    def decode(self, tokens: list[int], position: int) -> list[int]:
        """The next token of each sequence after ``tokens``, which all stand at ``position``."""
        return self._compute([(token, position, sequence, True) for sequence, token in enumerate(tokens)])

    def _compute(self, rows: list[tuple[int, int, int, bool]]) -> list[int]:
        batch = self._batch
        batch.n_tokens = len(rows)
        for row, (token, position, sequence, wanted) in enumerate(rows):
            batch.token[row], batch.pos[row], batch.logits[row] = token, position, wanted
            batch.n_seq_id[row], batch.seq_id[row][0] = 1, sequence
        status = llama.llama_decode(self._context, batch)
        if status:
            raise RuntimeError(f"llama_decode answered {status}")
        return [self._greedy(row) for row, (*_, wanted) in enumerate(rows) if wanted]

    def _greedy(self, row: int) -> int:
        logits = llama.llama_get_logits_ith(self._context, row)
        return int(np.argmax(np.ctypeslib.as_array(logits, shape=(self._vocab_size,))))


@contextmanager
def opened(context: Context) -> Iterator[Context]:
    try:
        yield context
    finally:
        context.close()


def load() -> tuple[Callable[[Message], Message], Message]:
    path, threads = sys.argv[1], int(sys.argv[2])
    llama.llama_log_set(_quiet, ctypes.c_void_p(0))
    llama.llama_backend_init()
    model = llama.llama_model_load_from_file(path.encode(), llama.llama_model_default_params())
    if not model:
        raise RuntimeError(f"llama.cpp did not load {path}")

    def generate(prompts: Prompts, new_tokens: int) -> Iterator[Sequence[int]]:
        batch, length = len(prompts), len(prompts[0])
        with opened(Context(model, threads, batch, length + new_tokens)) as context:
            yield [0] * batch
            tokens = context.prefill(prompts)
            yield [1] * batch
            for count in range(2, new_tokens + 1):
                tokens = context.decode(tokens, length + count - 2)
                yield [count] * batch

    return timed(generate), {"version": f"llama-cpp-python {llama.__version__}"}


@llama.llama_log_callback  # type: ignore[untyped-decorator]
def _quiet(level: int, text: bytes, data: object) -> None:
    """Errors come back as statuses; the rest is chatter."""


if __name__ == "__main__":
    serve(load)
