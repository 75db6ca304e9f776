"""100 jobs with one prompt of 1,024 tokens before their own few: how much of it is computed once, and what that saves.

Last, the engine is gone and another one starts on its pool file: the 101st job finds the prefix there.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from pytest_benchmark.fixture import BenchmarkFixture

from benchmarks.harness import (
    PAGE_SIZE,
    Run,
    Side,
    Subject,
    describe,
    in_turns,
    make_budget,
    make_job,
    open_pool,
    paged,
    run_jobs,
)
from engine.pools import HostPool
from engine.residency import Residency
from engine.sequence import Request
from recovery.checkpointer import Checkpointer, as_table
from storage.records import PageEntry

GOAL = 1.05  #: prompt rows computed for each one that differs from all others, at most
JOBS, FEW_JOBS = 100, 8  #: few, where the prefix is computed for each of them
PREFIX, TAIL, OUTPUT = 1024, 24, 8  #: tokens
DEVICE_PAGES = HOST_PAGES = 1024
ROUNDS, RESTARTS = 3, 15


def prefixed_jobs(subject: Subject, count: int) -> list[Request]:
    rng = np.random.default_rng(0)
    prefix = subject.prompt(rng, PREFIX)
    return [make_job(order, prefix + subject.prompt(rng, TAIL), OUTPUT) for order in range(count)]


def apart(jobs: list[Request]) -> list[Request]:
    """The same jobs, but none of their pages are anybody else's."""
    return [make_job(job.order, job.prompt_ids, job.max_tokens, sharing=job.sequence_id) for job in jobs]


def side(subject: Subject, jobs: list[Request]) -> Side[Run]:
    return paged(subject, jobs, DEVICE_PAGES)


def rows_for_each_unique(runs: list[Run], jobs: list[Request]) -> float:
    return max(run.prompt_rows for run in runs) / (PREFIX + TAIL * len(jobs))


def test_many(benchmark: BenchmarkFixture, subject: Subject, quick: bool) -> None:
    jobs = prefixed_jobs(subject, JOBS)
    runs = in_turns(benchmark, side(subject, jobs), {}, 1 if quick else ROUNDS)["ours"]
    rows = rows_for_each_unique(runs, jobs)
    assert rows <= GOAL
    benchmark.extra_info |= {"ours": describe(runs), "jobs": JOBS, "rows_for_each_unique": rows, "goal": GOAL}


def test_against_apart(benchmark: BenchmarkFixture, subject: Subject, quick: bool) -> None:
    """Fewer jobs: what is shared above is computed for each of them on the other side."""
    jobs = prefixed_jobs(subject, FEW_JOBS)
    runs = in_turns(benchmark, side(subject, jobs), {"apart": side(subject, apart(jobs))}, 1 if quick else ROUNDS)
    assert all(run.tokens == runs["apart"][0].tokens for run in runs["ours"])
    assert all(run.prompt_rows == (PREFIX + TAIL) * FEW_JOBS for run in runs["apart"])
    benchmark.extra_info |= {name: describe(each) for name, each in runs.items()}
    benchmark.extra_info |= {"jobs": FEW_JOBS, "rows_for_each_unique": rows_for_each_unique(runs["ours"], jobs)}


# --- a restart ----------------------------------------------------------------------------------------------------------


class Life:
    """An engine's life on a pool file; its table outlives it, as the store's does."""

    def __init__(self, subject: Subject, path: Path, table: dict[int, PageEntry]) -> None:
        device = subject.pool(DEVICE_PAGES)
        self._pool = open_pool(path, device, HOST_PAGES)
        host = HostPool(HOST_PAGES, device.geometry, self._pool)
        self.residency: Residency = subject.residency(device, host, table=as_table(table))
        self.engine = subject.engine(self.residency, make_budget())
        assert self.residency.host is not None
        self._checkpointer, self._table = Checkpointer(self.residency.host), table

    def write_table(self) -> None:
        publish, drop = self._checkpointer.take_writes()
        for page in drop:
            self._table.pop(page, None)
        self._table |= publish
        self._checkpointer.written(publish, drop)

    def close(self) -> None:
        while self.residency.in_flight:
            self.residency.collect(0.1)
        self.write_table()
        self.residency.close()
        self._pool.close()


def test_restart(benchmark: BenchmarkFixture, subject: Subject, quick: bool, disk: Path) -> None:
    """The 101st job, from its submission to its last token, against an engine that has no pool file."""
    *jobs, last = prefixed_jobs(subject, JOBS + 1)
    table: dict[int, PageEntry] = {}
    first_life = Life(subject, disk / "pool", table)
    run_jobs(first_life.engine, jobs, first_life.write_table)
    first_life.close()
    stored = dict(table)

    @contextmanager
    def restarted() -> Iterator[Callable[[], Run]]:
        life = Life(subject, disk / "pool", dict(stored))
        yield lambda: run_jobs(life.engine, [last], life.write_table)
        life.close()

    runs = in_turns(benchmark, restarted, {"empty": side(subject, [last])}, 1 if quick else RESTARTS)
    assert all(run.tokens == runs["empty"][0].tokens for run in runs["ours"])
    assert all(run.prompt_rows == TAIL for run in runs["ours"])
    assert all(run.stats.swapped_in == PREFIX // PAGE_SIZE for run in runs["ours"])
    benchmark.extra_info |= {name: describe(each) for name, each in runs.items()}
