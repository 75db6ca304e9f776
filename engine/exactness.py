"""Is a row's result independent of its company? Proved by construction in the kernels, checked on the loaded model before it
serves."""

import hashlib
import json
import os
import platform
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from llvmlite import binding

from engine import sources
from engine.kernels.attention import attend_rows
from engine.pools import DTYPES, kernel_array
from engine.runner import Runner

_PACKAGES = ("torch", "numba", "llvmlite", "numpy", "transformers")
#: sources in which a change may change bits
_ARITHMETIC = ("kernels/*.py", "llama*.py", "rowwise.py", "chunk_attention.py")
# They choose other code paths inside torch, MKL and oneDNN.
_ENVIRONMENT = (
    "ATEN_CPU_CAPABILITY",
    "MKL_CBWR",
    "MKL_ENABLE_INSTRUCTIONS",
    "MKL_DYNAMIC",
    "MKL_NUM_THREADS",
    "ONEDNN_MAX_CPU_ISA",
    "DNNL_MAX_CPU_ISA",
)
ROWS = 9
_GROUPS = (3, 8, 9)
_CONTEXT = 5


def arithmetic_fingerprint(
    *,
    threads: int,
    weights: str,
    kv_dtype: str,
    prefill_chunk: int,
    page_size: int,
    device_facts: Mapping[str, object] | None = None,
) -> str:
    """32 hex digits (BLAKE2b-128) of all that may change the bits of a result for the same model and tokens.

    Covers library versions, the sources of our arithmetic, the CPU and its features (with a device too: rotary frequencies are
    computed there), variables that steer the libraries, the arguments, and ``Runner.device_facts``.
    """
    facts: dict[str, Any] = {
        "packages": {name: version(name) for name in _PACKAGES},
        "sources": sources.digest(*_ARITHMETIC),
        "machine": platform.machine(),
        "cpu": [
            binding.get_host_cpu_name(),
            _cpu_model(),
            sorted(name for name, has in binding.get_host_cpu_features().items() if has),
        ],
        "cores": min(threads, len(os.sched_getaffinity(0))),  # MKL starts no more threads than that
        "environment": {name: os.environ.get(name) for name in _ENVIRONMENT},
        "arguments": [threads, weights, kv_dtype, prefill_chunk, page_size],
    }
    if device_facts is not None:
        facts["device"] = dict(device_facts)
    return hashlib.blake2b(json.dumps(facts, sort_keys=True).encode(), digest_size=16).hexdigest()


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "")


def self_test(runner: Runner) -> list[str]:
    """What is not exact on this machine with this model, in words; empty when everything is. Takes pages of its own, not the
    runner's.

    Rows alone against the same rows among others, ``==`` on logits and pages; a replay of several rows in one call against one
    by one; a prompt chunk against itself in other pages. When rows differ on the CPU, the modules and kernels that differ are
    named (on a device a layer alone, outside its bucket, tells nothing).
    """
    problems = _end_to_end(runner)
    if problems and runner.model.device == "cpu" and runner.model.module is not None:
        from engine.differing_layers import differing_layers

        problems += differing_layers(Trial(runner))
    if problems and runner.model.device == "cpu":
        problems += _differing_attention(runner)
    return problems


class Trial:
    """Its own pages: ``ROWS`` sequences of ``_CONTEXT`` generated rows each, and one more row to compute."""

    def __init__(self, runner: Runner) -> None:
        model = runner.model
        self.pages_each = -(-(_CONTEXT + 1) // runner.page_size)
        self.tables = np.arange(ROWS * self.pages_each, dtype=np.int32).reshape(ROWS, -1)
        shape = (ROWS * self.pages_each, *model.geometry(runner.page_size).page_shape)
        self.pool = torch.zeros(shape, dtype=DTYPES[model.kv_dtype], device=runner.pool.device)
        self.runner = runner.over(self.pool)
        self.tokens = np.random.default_rng(1).integers(0, model.vocab_size, (ROWS, _CONTEXT + 1))

    def run(self, sequences: np.ndarray[Any, Any], first: int, last: int) -> torch.Tensor:
        """Rows ``first .. last - 1`` of each of ``sequences`` in one call; logits of each one's last row."""
        count = last - first
        positions = np.tile(np.arange(first, last, dtype=np.int32), len(sequences))
        return self.runner.run_rows(
            self.tokens[sequences, first:last].reshape(-1),
            positions,
            self.tables,
            np.repeat(sequences, count).astype(np.int32),
            np.arange(count - 1, count * len(sequences), count, dtype=np.int32),
        )


def _end_to_end(runner: Runner) -> list[str]:
    problems = []
    trial = Trial(runner)
    everyone = np.arange(ROWS)
    trial.run(everyone, 0, _CONTEXT)
    replayed = trial.pool.clone()
    for position in range(_CONTEXT):
        trial.run(everyone[:1], position, position + 1)
    if not torch.equal(replayed, trial.pool):
        problems.append(f"{_CONTEXT} rows of {ROWS} sequences in one call and one row at a time give different keys or values")
    alone = torch.cat([trial.run(everyone[i : i + 1], _CONTEXT, _CONTEXT + 1) for i in everyone])
    pages = trial.pool.clone()
    for group in _GROUPS:
        together = trial.run(everyone[:group], _CONTEXT, _CONTEXT + 1)
        if not torch.equal(together, alone[:group]):
            problems.append(f"a row alone and among {group} rows gives different logits")
        if not torch.equal(pages, trial.pool):
            problems.append(f"a row alone and among {group} rows gives different keys or values")
    chunk = trial.tokens.reshape(-1)[: min(runner.prefill_chunk, len(trial.tables.reshape(-1)) * runner.page_size // 2)]
    first = trial.runner.run_chunk(chunk, 0, trial.tables.reshape(-1), 0, True)
    second = trial.runner.run_chunk(chunk, 0, trial.tables.reshape(-1)[::-1].copy(), 0, True)
    assert first is not None
    assert second is not None
    if not torch.equal(first, second):
        problems.append("a prompt chunk gives different logits in other pages")
    return problems


def _differing_attention(runner: Runner) -> list[str]:
    model, trial = runner.model, Trial(runner)
    random = np.random.default_rng(2)
    kv_shape = (ROWS, model.num_kv_heads, model.head_dim)
    key, value = (random.standard_normal(kv_shape, dtype=np.float32) for _ in range(2))
    query = random.standard_normal(kv_shape, dtype=np.float32)
    positions, sequences = np.full(ROWS, _CONTEXT, np.int32), np.arange(ROWS, dtype=np.int32)

    def attend(rows: slice) -> np.ndarray[Any, Any]:
        output = np.empty_like(query[rows])
        pool, scaling = kernel_array(trial.pool), np.float32(0.1)
        queries, keys, values, where, at = query[rows], key[rows], value[rows], sequences[rows], positions[rows]
        attend_rows(queries, keys, values, pool, 0, trial.tables, where, at, scaling, output, model.threads)
        return output

    together = attend(slice(None))
    if any(not np.array_equal(attend(slice(i, i + 1))[0], together[i]) for i in range(ROWS)):
        return [f"paged attention: a row alone and among {ROWS} differ"]
    return []
