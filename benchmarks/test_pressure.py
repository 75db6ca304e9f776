"""Six times as many jobs as the device has pages for: let them press, or admit eight at a time?

48 jobs of mixed length, device pages for 8 of them on average, a pool file for all. Ours admits up to 32 at once, as the service
does by default, and preempts when pages run out; ``capped`` is the same engine with the same pages that admits 8. All jobs are
there from the start. The tokens of both must be those of an engine with pages for everybody.
"""

import statistics
from pathlib import Path

import numpy as np
import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from benchmarks.harness import (
    Subject,
    describe,
    in_turns,
    make_budget,
    make_jobs,
    paged,
    pages_needed,
)
from engine.scheduler import Preemption
from engine.sequence import Request

AT_ONCE, JOBS = 8, 48
PROMPTS, OUTPUTS = (32, 256), (32, 96)  #: tokens, uniform
ROUNDS, QUICK_ROUNDS = 5, 1
#: The service's defaults leave room to grow at each admission, so that pages hardly ever run out; without, and without a choice,
#: every shortage is a swap.
BUDGETS = {
    "default": make_budget(max_running=32),
    "swap": make_budget(max_running=32, min_resident_steps=1, preemption=Preemption.SWAP),
}


def mixed_jobs(subject: Subject) -> list[Request]:
    rng = np.random.default_rng(0)
    lengths = zip(rng.integers(*PROMPTS, JOBS, endpoint=True), rng.integers(*OUTPUTS, JOBS, endpoint=True), strict=True)
    return make_jobs(subject, [(int(prompt), int(output)) for prompt, output in lengths])


@pytest.mark.parametrize("budget", BUDGETS)
def test_pressure(benchmark: BenchmarkFixture, subject: Subject, quick: bool, disk: Path, budget: str) -> None:
    jobs = mixed_jobs(subject)
    needed = sum(map(pages_needed, jobs))
    device_pages = -(-needed * AT_ONCE // JOBS)
    ours = paged(subject, jobs, device_pages, BUDGETS[budget], pool_path=disk / "ours")
    capped = paged(subject, jobs, device_pages, make_budget(max_running=AT_ONCE), pool_path=disk / "capped")
    runs = in_turns(benchmark, ours, {"capped": capped}, QUICK_ROUNDS if quick else ROUNDS)
    with paged(subject, jobs, needed)() as run:
        expected = run().tokens
    assert all(run.tokens == expected for run in runs["ours"] + runs["capped"])
    for name, each in runs.items():
        benchmark.extra_info[name] = describe(each)
    pressed = [run.stats for run in runs["ours"]]
    if budget == "swap":
        assert all(stats.swapped_in for stats in pressed)
        hidden = [1 - stats.stall_seconds / stats.in_seconds for stats in pressed]
        benchmark.extra_info["swap_in_hidden"] = statistics.median(hidden)
