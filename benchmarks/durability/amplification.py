"""Write amplification: bytes written to the pool file for each byte of KV pages that became full."""

import asyncio
import random
from pathlib import Path

from benchmarks.durability.figures import Figure, Goal, Section
from benchmarks.durability.setup import Options, bytes_written, metric, pages_for, service
from benchmarks.durability.streams import Jobs
from benchmarks.harness import PAGE_SIZE
from chaos.cluster import Cluster
from chaos.processes import wait_until
from storage.pool_file import read_pool_header

GOAL = Goal("=", 1.0)
_JOBS = 16


def sealed_pages(prompt: int, generated: int) -> int:
    """Pages of a job that became full. Its last token is never fed back, so it has no slot."""
    return (prompt + generated - 1) // PAGE_SIZE


def measure(options: Options) -> Section:
    prompts = options.prompts(random.Random(options.seed), _JOBS, options.prompt)
    pages = pages_for(_JOBS, options.prompt + options.tokens)
    expected = _JOBS * sealed_pages(options.prompt, options.tokens)
    with service(options, "amplification", device_pages=pages, host_pages=2 * pages) as cluster:
        pid, page_bytes = cluster.require_pid("engine"), _page_bytes(cluster)
        written, counted = bytes_written(pid), metric(cluster, "swapped_bytes_total", direction="out")
        asyncio.run(_run(cluster.url, prompts, options.tokens))
        wait_until(lambda: metric(cluster, "checkpoint_lag_tokens") == 0, 30.0, "the end of all copies", pause=0.1)
        asyncio.run(_run(cluster.url, [prompts[0][:1]], 1))  # the engine brings its counters up to date when it takes a step
        written, counted = bytes_written(pid) - written, metric(cluster, "swapped_bytes_total", direction="out") - counted
        unbacked = metric(cluster, "pages_unbacked_total")
    sealed = expected * page_bytes
    figures = [
        Figure("sealed pages", expected, "pages"),
        Figure("copied to the pool file / sealed, by the engine's counter", counted / sealed, "", GOAL),
        Figure("written to files (pool and log) / sealed, by the kernel", written / sealed, "", GOAL),
        Figure("sealed pages without a host page", unbacked, "pages", Goal("<=", 0)),
    ]
    return Section(figures, {"sealed_bytes": sealed, "counted_bytes": counted, "written_bytes": written})


def _page_bytes(cluster: Cluster) -> int:
    return read_pool_header(Path(cluster.main.data_dir) / "pool.safetensors").page_bytes


async def _run(url: str, prompts: list[list[int]], max_tokens: int) -> None:
    async with Jobs(url) as jobs:
        await jobs.start(prompts, max_tokens)
        await jobs.finish()
