"""Tokens per second by batch, page size and share of the pages, against a contiguous KV cache (``naive.py``).

Every job has 64 prompt and 32 generated tokens; the time is from the first submission to the last token, and ``decode_tok_per_s``
counts the steps that computed no prompt. All sides must give the same tokens.
"""

import numpy as np
import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from benchmarks import naive
from benchmarks.harness import (
    PAGE_SIZE,
    Run,
    Side,
    Subject,
    describe,
    in_turns,
    make_budget,
    make_jobs,
    paged,
    pages_needed,
    running,
)
from engine.sequence import Request

PAGE_SIZES, BATCHES = (8, 16, 32, 64), (1, 4, 8, 16, 32)
SCARCE_PAGE_SIZES, SCARCE_BATCHES, SHARES = (16, 64), (8, 32), (0.25, 0.5)
PROMPT, OUTPUT = 64, 32  #: tokens
ROUNDS, OTHER_ROUNDS, QUICK_ROUNDS = 5, 3, 1

MAX_LENGTH = 1024  #: tokens of prompt and answer that the contiguous side has to be ready for
BUFFERS, MIXED_JOBS = 4, 48


def contiguous(subject: Subject, jobs: list[Request], buffers: int) -> Side[Run]:
    return lambda: running(naive.make_engine(subject, buffers, MAX_LENGTH), jobs)


def compare(benchmark: BenchmarkFixture, ours: Side[Run], others: dict[str, Side[Run]], rounds: int) -> None:
    runs = in_turns(benchmark, ours, others, rounds)
    expected = runs["ours"][0].tokens
    assert all(run.tokens == expected for each in runs.values() for run in each)
    benchmark.extra_info |= {name: describe(each) for name, each in runs.items()}


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("batch", BATCHES)
def test_batch(benchmark: BenchmarkFixture, subject: Subject, quick: bool, batch: int, page_size: int) -> None:
    """Pages for all at once, against buffers for all at once."""
    jobs = make_jobs(subject, [(PROMPT, OUTPUT)] * batch)
    needed = sum(pages_needed(job, page_size) for job in jobs)
    ours = paged(subject, jobs, needed, page_size=page_size)
    compare(
        benchmark,
        ours,
        {"naive": contiguous(subject, jobs, batch)},
        QUICK_ROUNDS if quick else ROUNDS if page_size == PAGE_SIZE else OTHER_ROUNDS,
    )


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("page_size", SCARCE_PAGE_SIZES)
@pytest.mark.parametrize("batch", SCARCE_BATCHES)
def test_scarce(benchmark: BenchmarkFixture, subject: Subject, quick: bool, batch: int, page_size: int, share: float) -> None:
    """Device pages for a share of what the jobs need at once, against pages for all."""
    jobs = make_jobs(subject, [(PROMPT, OUTPUT)] * batch)
    needed = sum(pages_needed(job, page_size) for job in jobs)
    ours = paged(subject, jobs, int(needed * share), page_size=page_size)
    whole = paged(subject, jobs, needed, page_size=page_size)
    compare(benchmark, ours, {"all_pages": whole}, QUICK_ROUNDS if quick else OTHER_ROUNDS)


def test_same_memory(benchmark: BenchmarkFixture, subject: Subject, quick: bool) -> None:
    """How many Sequences of mixed length are in the memory of four buffers at once, and what that is worth.

    Lengths are log-normal, as conversations are: most are short, a few very long. Both sides are ready for 1,024 tokens.
    """
    rng = np.random.default_rng(0)
    prompts = np.clip(rng.lognormal(np.log(128), 1.0, MIXED_JOBS), 16, MAX_LENGTH * 3 // 4)
    outputs = np.clip(rng.lognormal(np.log(48), 0.8, MIXED_JOBS), 8, MAX_LENGTH // 4)
    jobs = make_jobs(subject, [(int(p), int(o)) for p, o in zip(prompts, outputs, strict=True)])
    ours = paged(subject, jobs, BUFFERS * MAX_LENGTH // PAGE_SIZE, make_budget(max_running=MIXED_JOBS))
    compare(benchmark, ours, {"naive": contiguous(subject, jobs, BUFFERS)}, QUICK_ROUNDS if quick else OTHER_ROUNDS)
    lengths = [len(job.prompt_ids) + job.max_tokens for job in jobs]
    benchmark.extra_info |= {"mean_length": float(np.mean(lengths)), "longest": max(lengths), "max_length": MAX_LENGTH}
    benchmark.extra_info |= {"slots": BUFFERS * MAX_LENGTH, "jobs": MIXED_JOBS}
