"""A model whose every bit depends on every page that it reads: a row is a hash of all rows before it, as they stand in the pages.

So a page that is wrong, stale, torn or another job's changes what comes out, as it would with real attention; and what has to come
out is known without any engine, by hashing alone.
"""

import hashlib
import struct
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace

import numpy as np
import torch
from tokenizers import Tokenizer, models

from engine.calls import CallSlot
from engine.geometry import PageGeometry
from engine.identity import GENERATED, page_identities, root_identity
from engine.sampler import Draw, SamplingParams, sample_rows
from storage.job_spec import JobSpec

PAGE_SIZE = 4
GEOMETRY = PageGeometry(num_layers=1, page_size=PAGE_SIZE, num_kv_heads=1, head_dim=1, dtype="float32")
PAGE_BYTES = GEOMETRY.page_bytes
HALF = PAGE_BYTES // 2  #: keys of all slots, then values of all slots
WORDS = "abcdefghijklmnop"
VOCABULARY, END = len(WORDS), 0
MODEL, ARITHMETIC = "hash-model", "blake2b"
MAX_CONTEXT = 64
ROOT = root_identity(MODEL, ARITHMETIC)
TOKENIZER = Tokenizer(models.WordLevel({word: token for token, word in enumerate(WORDS)}, unk_token=WORDS[END]))


class Pages:
    """The model's arithmetic over the bytes of a pool, whichever it is."""

    def __init__(self, memory: memoryview) -> None:
        self._memory = memory

    def rows(self, table: list[int], count: int) -> "hashlib.blake2b":
        """A hash of the first ``count`` rows of a sequence, as they stand in its pages."""
        digest = hashlib.blake2b(digest_size=VOCABULARY)
        full, rest = divmod(count, PAGE_SIZE)
        for page in table[:full]:
            digest.update(self._memory[page * PAGE_BYTES : (page + 1) * PAGE_BYTES])
        if rest:
            keys = table[full] * PAGE_BYTES
            digest.update(self._memory[keys : keys + 4 * rest])
            digest.update(self._memory[keys + HALF : keys + HALF + 4 * rest])
        return digest

    def write(self, table: list[int], position: int, token: int, call_rows: int) -> None:
        digest = self.rows(table, position)
        digest.update(struct.pack("<III", token, position, call_rows))
        row = digest.digest()
        page, slot = divmod(position, PAGE_SIZE)
        keys = table[page] * PAGE_BYTES + 4 * slot
        self._memory[keys : keys + 4] = row[:4]
        self._memory[keys + HALF : keys + HALF + 4] = row[4:8]

    def logits(self, table: list[int], position: int) -> np.ndarray:
        return np.frombuffer(self.rows(table, position + 1).digest(), np.uint8).astype(np.float32) / 16


class HashRunner:
    """``engine.runner.Runner`` over a DevicePool."""

    device_facts = None
    page_size = PAGE_SIZE

    def __init__(self, device, prefill_chunk: int) -> None:
        self.model = SimpleNamespace(threads=1, slot=CallSlot(1), vocab_size=VOCABULARY)
        self.prefill_chunk = prefill_chunk
        self._pages = Pages(memoryview(device.bytes.numpy().reshape(-1)))

    def run_chunk(self, token_ids, start, page_table, store_from, want_logits):
        table, count = page_table.tolist(), len(token_ids)
        assert 1 <= count <= self.prefill_chunk
        assert start % self.prefill_chunk == 0
        for position, token in enumerate(token_ids.tolist(), start):
            if position >= store_from:
                self._pages.write(table, position, token, count)
        return torch.from_numpy(self._pages.logits(table, start + count - 1)) if want_logits else None

    def run_rows(self, token_ids, positions, page_tables, row_sequence, logits_rows):
        tables = page_tables.tolist()
        rows = list(zip(token_ids.tolist(), positions.tolist(), row_sequence.tolist(), strict=True))
        for token, position, sequence in rows:
            self._pages.write(tables[sequence], position, token, GENERATED)
        logits = np.empty((len(logits_rows), VOCABULARY), np.float32)
        for out, row in zip(logits, logits_rows.tolist(), strict=True):
            _, position, sequence = rows[row]
            out[:] = self._pages.logits(tables[sequence], position)
        return torch.from_numpy(logits)


@dataclass(frozen=True)
class Kind:
    """What decides a job's tokens."""

    prompt: tuple[int, ...]
    max_tokens: int
    seed: int = 0
    temperature: float = 0.0
    repetition_penalty: float = 1.0
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False

    @property
    def spec(self) -> JobSpec:
        return JobSpec(
            MODEL,
            self.max_tokens,
            self.seed,
            temperature=self.temperature,
            repetition_penalty=self.repetition_penalty,
            stop=self.stop,
            ignore_eos=self.ignore_eos,
        )


@dataclass(frozen=True)
class Reference:
    """What a job comes to when nothing ever goes wrong. ``pages``: identity -> bytes, of all its full pages."""

    tokens: tuple[int, ...]
    text: str
    finish_reason: str
    pages: dict[str, bytes]


@cache
def reference(kind: Kind, prefill_chunk: int) -> Reference:
    """By hashing and sampling alone: no engine, no pages but the job's own, one row at a time."""
    memory = bytearray(-(-MAX_CONTEXT // PAGE_SIZE) * PAGE_BYTES)
    pages, table = Pages(memoryview(memory)), list(range(MAX_CONTEXT // PAGE_SIZE))
    length = len(kind.prompt)
    for position, token in enumerate(kind.prompt):
        start = position - position % prefill_chunk
        pages.write(table, position, token, min(prefill_chunk, length - start))
    params = SamplingParams(seed=kind.seed, temperature=kind.temperature, repetition_penalty=kind.repetition_penalty)
    tokens: list[int] = []
    while True:
        logits = pages.logits(table, length + len(tokens) - 1)
        (sampled,) = sample_rows(logits[None], [Draw(params, len(tokens), kind.prompt, tuple(tokens))])
        tokens.append(sampled.token)
        text = TOKENIZER.decode(tokens)
        stops = [text.find(stop) for stop in kind.stop if stop in text]
        if stops or (sampled.token == END and not kind.ignore_eos):
            reason = "stop"
            break
        if len(tokens) == kind.max_tokens:
            reason = "length"
            break
        pages.write(table, length + len(tokens) - 1, sampled.token, GENERATED)
    identities = page_identities(ROOT, [*kind.prompt, *tokens[:-1]], length, page_size=PAGE_SIZE, prefill_chunk=prefill_chunk)
    contents = {name: bytes(memory[i * PAGE_BYTES : (i + 1) * PAGE_BYTES]) for i, name in enumerate(identities)}
    return Reference(tuple(tokens), text[: min(stops)] if stops else text, reason, contents)
