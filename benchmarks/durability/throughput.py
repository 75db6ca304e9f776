"""What checkpoints cost while nothing happens: tokens a second with a pool file against ``--host-pages 0``.

Two services run side by side; one works while the other waits, A B B A. Both get the same prompts and must give the same tokens.
"""

import asyncio
import random
import statistics
from contextlib import ExitStack
from typing import Any

from benchmarks.durability.figures import Figure, Goal, Section, median_ratio
from benchmarks.durability.setup import Options, pages_for, service
from benchmarks.durability.streams import Jobs, window_rate

GOAL = Goal("<=", 1.0)  #: per cent
ON, OFF = "checkpoints", "none"


def order(number: int) -> tuple[str, str]:
    """Who goes first alternates: A B, B A, A B ..."""
    return (ON, OFF) if number % 2 == 0 else (OFF, ON)


async def _run(url: str, prompts: list[list[int]], max_tokens: int) -> tuple[float, list[list[int]]]:
    """Tokens a second after prefill, and every job's tokens."""
    async with Jobs(url) as jobs:
        streams = await jobs.start(prompts, max_tokens)
        await jobs.finish()
    return window_rate([stream.arrivals for stream in streams]), [stream.tokens for stream in streams]


def measure(options: Options) -> Section:
    rng = random.Random(options.seed)
    device_pages = pages_for(max(options.batches), options.prompt + options.tokens)
    figures: list[Figure] = []
    raw: dict[str, Any] = {}
    with ExitStack() as stack:
        urls = {
            side: stack.enter_context(service(options, side, device_pages=device_pages, host_pages=host_pages)).url
            for side, host_pages in ((ON, 4 * device_pages), (OFF, 0))
        }
        for batch in options.batches:
            rounds: list[dict[str, float]] = []
            for number in range(-1, options.rounds):  # the first one warms both
                prompts = options.prompts(rng, batch, options.prompt)
                results = {side: asyncio.run(_run(urls[side], prompts, options.tokens)) for side in order(number)}
                if results[ON][1] != results[OFF][1]:
                    raise SystemExit("the two sides gave different tokens")
                rounds.append({side: rate for side, (rate, _) in results.items()})
            del rounds[0]
            cost = 100 * (1 - median_ratio((r[ON], r[OFF]) for r in rounds))
            medians = {side: statistics.median(r[side] for r in rounds) for side in (ON, OFF)}
            figures += [
                Figure(f"{batch} jobs, with checkpoints", medians[ON], "tok/s"),
                Figure(f"{batch} jobs, without", medians[OFF], "tok/s"),
                Figure(f"{batch} jobs, cost of checkpoints", cost, "%", GOAL),
            ]
            raw[str(batch)] = rounds
    return Section(figures, raw)
