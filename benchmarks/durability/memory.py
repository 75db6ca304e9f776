"""Memory of the engine process: its peak against what it must hold, and whether short jobs make it grow."""

import asyncio
import random
from typing import Any

from benchmarks.durability.amplification import sealed_pages
from benchmarks.durability.figures import Figure, Goal, Section, slope
from benchmarks.durability.setup import MIB, Options, pages_for, process_memory, service
from benchmarks.durability.streams import Jobs
from service.model_size import model_size

ALLOWANCE = 500  #: MiB beside weights and pools
_LARGE, _AT_ONCE = 16, 16
_RESERVE = 32  #: host pages that an engine keeps free
_SHORT_PROMPT, _SHORT_TOKENS = 6, 4
_WARM_UP, _EVERY = 200, 100  #: short jobs
_NO_GROWTH = Goal("<=", 32)  #: bytes a job: 64 KB in 2,000 jobs, where one string kept for each would be 100 KB


def measure(options: Options) -> Section:
    rng = random.Random(options.seed)
    prompt, tokens = 4 * options.prompt, options.tokens
    device_pages = pages_for(_LARGE, prompt + tokens)
    host_pages = _LARGE * sealed_pages(prompt, tokens) + _RESERVE  # all are written, so all count
    must_hold = model_size(options.folder).weights + (device_pages + host_pages) * options.page_bytes
    with service(options, "memory", device_pages=device_pages, host_pages=host_pages) as cluster:
        cluster.stop()  # the first life may have converted the weights, which later ones find done
        cluster.serve()
        pid = cluster.require_pid("engine")
        asyncio.run(_batch(cluster.url, options.prompts(rng, _LARGE, prompt), tokens))
        samples = asyncio.run(_grow(options, rng, cluster.url, pid))
        peak, anonymous, files = (process_memory(pid, key) for key in ("VmHWM", "RssAnon", "RssFile"))
    settled = [sample for sample in samples if sample["jobs"] >= min(_WARM_UP, samples[-1]["jobs"] / 2)]
    growth = {key: slope([(s["jobs"], s[key]) for s in settled]) for key in ("VmRSS", "RssAnon")}
    allowed = must_hold / MIB + ALLOWANCE
    figures = [
        Figure("weights and pools", must_hold / MIB, "MiB"),
        Figure("peak of the engine process", peak / MIB, "MiB", Goal("<=", round(allowed))),
        Figure("at the end, memory of its own", anonymous / MIB, "MiB"),
        Figure("at the end, mapped files: pool, weights, libraries", files / MIB, "MiB"),
        Figure("growth over short jobs, all memory", growth["VmRSS"], "bytes/job"),
        Figure("growth over short jobs, without files", growth["RssAnon"], "bytes/job", _NO_GROWTH),
        Figure("short jobs behind the warm-up", settled[-1]["jobs"] - settled[0]["jobs"], "jobs"),
    ]
    return Section(figures, {"samples": samples, "peak": peak, "anonymous": anonymous, "files": files, "must_hold": must_hold})


async def _batch(url: str, prompts: list[list[int]], max_tokens: int) -> None:
    async with Jobs(url) as jobs:
        await jobs.start(prompts, max_tokens)
        await jobs.finish()


async def _grow(options: Options, rng: random.Random, url: str, pid: int) -> list[dict[str, Any]]:
    """Memory of the engine, in bytes, after every hundred short jobs. No page of theirs becomes full: pools stay as they are."""
    samples: list[dict[str, Any]] = []
    async with Jobs(url) as jobs:
        for done in range(0, options.growth_jobs, _AT_ONCE):
            await jobs.start(options.prompts(rng, _AT_ONCE, _SHORT_PROMPT), _SHORT_TOKENS)
            await jobs.finish()
            if (done + _AT_ONCE) // _EVERY > done // _EVERY:
                samples.append({"jobs": done + _AT_ONCE} | {key: process_memory(pid, key) for key in ("VmRSS", "RssAnon")})
    return samples
