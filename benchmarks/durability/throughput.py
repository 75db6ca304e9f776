"""What checkpoints cost while nothing happens: tokens a second with a pool file against ``--host-pages 0``.

Two services run the same jobs. Their engines take turns of some seconds, the other one stopped in mid-step: a machine whose memory
is twice as fast in one minute as in the next gives both the same. Both must give the same tokens.

Pairs of services differ from each other by more than the turns of one pair do. So each round has a pair of its own, a round is one
ratio, and the error is that of the rounds.
"""

import asyncio
import random
import signal
import statistics
import time
from contextlib import AsyncExitStack, ExitStack
from itertools import count
from typing import Any

from benchmarks.durability.figures import Figure, Goal, Section, median_error, median_ratio
from benchmarks.durability.setup import Options, pages_for, service
from benchmarks.durability.streams import Jobs, Stream
from chaos.cluster import Cluster

GOAL = Goal("<=", 1.0)  #: per cent
ON, OFF = "checkpoints", "none"
SIDES = (ON, OFF)
TURN = 2.0  #: seconds; far less than a lease, some fifty steps
_SETTLE = 0.05  #: seconds until what a stopped engine had sent is with its clients

Turns = list[dict[str, float]]  #: tokens a second of either side, turn by turn


def order(number: int) -> tuple[str, str]:
    """Who goes first alternates: A B, B A, A B ..."""
    return SIDES if number % 2 == 0 else (OFF, ON)


async def _round(sides: dict[str, Cluster], prompts: list[list[int]], max_tokens: int) -> Turns:
    """The rates of all turns in which every job of both sides generated."""
    async with AsyncExitStack() as stack:
        jobs = {side: await stack.enter_async_context(Jobs(cluster.url)) for side, cluster in sides.items()}
        streams = {side: await jobs[side].start(prompts, max_tokens) for side in SIDES}
        for side in SIDES:
            await jobs[side].until(streams[side], [1] * len(prompts), timeout=120.0)
        try:
            turns = await _turns(sides, streams, max_tokens)
        finally:
            for cluster in sides.values():
                cluster.signal("engine", signal.SIGCONT)
        for side in SIDES:
            await jobs[side].finish()
    if [stream.tokens for stream in streams[ON]] != [stream.tokens for stream in streams[OFF]]:
        raise SystemExit("the two sides gave different tokens")
    return turns


async def _turns(sides: dict[str, Cluster], streams: dict[str, list[Stream]], max_tokens: int) -> Turns:
    turns: Turns = []
    for cluster in sides.values():
        cluster.signal("engine", signal.SIGSTOP)
    await asyncio.sleep(_SETTLE)
    for number in count():
        rates = {side: await _turn(sides[side], streams[side]) for side in order(number)}
        if any(stream.count == max_tokens for side in SIDES for stream in streams[side]):
            return turns
        turns.append(rates)
    raise AssertionError("unreachable")


async def _turn(cluster: Cluster, streams: list[Stream]) -> float:
    before, began = sum(stream.count for stream in streams), time.monotonic()
    cluster.signal("engine", signal.SIGCONT)
    await asyncio.sleep(TURN)
    cluster.signal("engine", signal.SIGSTOP)
    took = time.monotonic() - began
    await asyncio.sleep(_SETTLE)
    return (sum(stream.count for stream in streams) - before) / took


def measure(options: Options) -> Section:
    rng = random.Random(options.seed)
    figures: list[Figure] = []
    raw: dict[str, Any] = {}
    for batch in options.batches:
        rounds = [_fresh_pair(options, number, options.prompts(rng, batch, options.prompt)) for number in range(options.rounds)]
        ratios = [found["ratio"] for found in rounds]
        figures += [
            Figure(f"{batch} jobs, with checkpoints", statistics.median(found[ON] for found in rounds), "tok/s"),
            Figure(f"{batch} jobs, without", statistics.median(found[OFF] for found in rounds), "tok/s"),
            Figure(f"{batch} jobs, cost of checkpoints", 100 * (1 - statistics.median(ratios)), "%", GOAL),
            Figure(f"{batch} jobs, standard error of that", 100 * median_error(ratios), "%"),
            Figure(f"{batch} jobs, pairs of turns", sum(len(found["turns"]) for found in rounds)),
        ]
        raw[str(batch)] = rounds
    return Section(figures, raw)


def _fresh_pair(options: Options, number: int, prompts: list[list[int]]) -> dict[str, Any]:
    """A round of two services that were started for it: median rates, the median ratio of its turns, the turns."""
    device_pages = pages_for(len(prompts), options.prompt + options.tokens)
    host_pages = {ON: 2 * device_pages, OFF: 0}
    with ExitStack() as stack:
        sides = {
            side: stack.enter_context(
                service(options, side, device_pages=device_pages, host_pages=host_pages[side], more={"standby": "off"})
            )
            for side in order(number)
        }
        turns = asyncio.run(_round(sides, prompts, options.tokens))
    medians = {side: statistics.median(turn[side] for turn in turns) for side in SIDES}
    return medians | {"ratio": median_ratio((turn[ON], turn[OFF]) for turn in turns), "turns": turns}
