"""Bringing a job's pages back from the pool file against computing them again: the engine alone, the file in the page cache.

Restored means: read, verified, on the device, and found by the job. Recomputed means: the prompt's chunks through the model.
Replayed means: generated tokens through the row kernels, as many as a step takes. Rounds are interleaved.
"""

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.durability.figures import Figure, Goal, Section, median_ratio
from benchmarks.durability.setup import MIB, Options
from benchmarks.harness import PAGE_SIZE, Subject, make_budget, make_job, open_pool
from engine.core import StepResult
from engine.pools import HostPool
from engine.residency import Arrived
from engine.sequence import Request, Sequence
from recovery.checkpointer import Checkpointer, as_table
from storage.pool_file import PoolFile
from storage.records import PageEntry

GOAL, GOAL_AT = Goal(">=", 50), 1024
_SPARE = 8  #: pages for what comes after the context
_PATIENCE = 0.1  #: seconds of one wait for copies; they are collected until all are there

Table = dict[int, tuple[str, int]]


def measure(options: Options) -> Section:
    subject = Subject.load(options.folder)
    rng = np.random.default_rng(options.seed)
    figures: list[Figure] = []
    raw: dict[str, Any] = {}
    for length in options.contexts:
        prompt = subject.prompt(rng, length)
        job = _with_log(prompt, subject.prompt(rng, 1))
        generated = _with_log(prompt[:PAGE_SIZE], subject.prompt(rng, length))
        rounds: list[dict[str, float]] = []
        with open_pool(options.place / f"restore-{length}.safetensors", subject.pool(1), length // PAGE_SIZE + _SPARE) as pool_file:
            table = _fill(subject, pool_file, prompt)
            sides: dict[str, Callable[[], float]] = {
                "restored": lambda table=table, job=job, pool_file=pool_file: restore(subject, pool_file, table, job),  # type: ignore[misc]
                "recomputed": lambda job=job, length=length: recompute(subject, job, prompt_rows=length),  # type: ignore[misc]
                "replayed": lambda job=generated, length=length: recompute(subject, job, generated_rows=length),  # type: ignore[misc]
            }
            for number in range(-1, options.rounds):  # the first one warms all
                names = list(sides) if number % 2 else list(reversed(sides))
                rounds.append({name: sides[name]() for name in names})
        del rounds[0]
        Path(options.place / f"restore-{length}.safetensors").unlink()
        figures += _figures(length, rounds, subject.model.geometry(PAGE_SIZE).page_bytes)
        raw[str(length)] = rounds
    return Section(figures, raw)


def _figures(length: int, rounds: list[dict[str, float]], page_bytes: int) -> list[Figure]:
    restored, recomputed, replayed = (statistics.median(r[side] for r in rounds) for side in ("restored", "recomputed", "replayed"))
    megabytes = length // PAGE_SIZE * page_bytes / MIB
    ratio = median_ratio((r["recomputed"], r["restored"]) for r in rounds)
    return [
        Figure(f"{length} tokens: restored", 1e3 * restored, "ms"),
        Figure(f"{length} tokens: restored", megabytes / restored, "MiB/s"),
        Figure(f"{length} tokens: recomputed as prompt", 1e3 * recomputed, "ms"),
        Figure(f"{length} tokens: recomputed / restored", ratio, "x", GOAL if length == GOAL_AT else None),
        Figure(f"{length} tokens: replayed as generated", 1e3 * replayed, "ms"),
        Figure(f"{length} tokens: replayed / restored", median_ratio((r["replayed"], r["restored"]) for r in rounds), "x"),
    ]


def _with_log(prompt: list[int], log: list[int]) -> Request:
    """A job as an engine gets it that comes back: with the tokens of its log."""
    base = make_job(0, prompt, len(log) + 2)
    return Request(
        base.sequence_id, base.prompt_ids, base.sampling, base.max_tokens, ignore_eos=True, generated_ids=tuple(log), root=base.root
    )


def _fill(subject: Subject, pool_file: PoolFile, prompt: list[int]) -> Table:
    """Compute a prompt with checkpoints on; the pool's table as its entries would be in Redis."""
    device = subject.pool(pool_file.num_pages)
    residency = subject.residency(device, HostPool(pool_file.num_pages, device.geometry, pool_file), table={})
    engine = subject.engine(residency, make_budget())
    engine.add(make_job(0, prompt, 2))
    while engine.has_work:
        engine.step()
    while residency.in_flight:
        residency.collect(_PATIENCE)
    residency.close()
    entries: dict[int, PageEntry] = Checkpointer(residency.host).take_writes()[0]
    return as_table(entries)


def restore(subject: Subject, pool_file: PoolFile, table: Table, job: Request) -> float:
    """Seconds from an engine that knows nothing but the table to a job that has its pages."""
    device = subject.pool(pool_file.num_pages)
    residency = subject.residency(device, HostPool(pool_file.num_pages, device.geometry, pool_file), table=table)
    sequence = Sequence(job)
    try:
        began = time.perf_counter()
        sources = residency.locate(sequence)
        assert sources is not None
        arrivals = [residency.admit(sequence, sources)]
        while not any(arrivals):
            arrivals += residency.collect(_PATIENCE)  # type: ignore[arg-type]
        seconds = time.perf_counter() - began
    finally:
        residency.close()
    arrived = next(filter(None, arrivals))
    if not isinstance(arrived, Arrived) or arrived.found != len(job.prompt_ids) // PAGE_SIZE:
        raise SystemExit(f"pages did not come back from the pool file: {arrived}")
    return seconds


def recompute(subject: Subject, job: Request, *, prompt_rows: int = 0, generated_rows: int = 0) -> float:
    """Seconds for so many rows of the prompt, or of generated tokens behind it, without any page to begin with."""
    residency = subject.residency(subject.pool(-(-(len(job.prompt_ids) + job.max_tokens) // PAGE_SIZE) + _SPARE))
    engine = subject.engine(residency, make_budget())
    total = StepResult()
    began = time.perf_counter()
    engine.add(job)
    while total.prompt_rows < prompt_rows or total.generated_rows < generated_rows:
        if generated_rows and total.prompt_rows < len(job.prompt_ids):
            began = time.perf_counter()  # its prompt is not what is measured
        result = engine.step()
        total.prompt_rows += result.prompt_rows
        total.generated_rows += result.generated_rows
    return time.perf_counter() - began
