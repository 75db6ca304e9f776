"""Hit ratios of the eviction policies on traces of page reads, beside Belady's optimum. ``python -m benchmarks.eviction_traces``

A trace is the pages that new readers take, in order (``hit`` or ``insert``; refreshes are no accesses). A page is 16 tokens, a pool
has thousands. The first read of a page counts as a miss, which even the optimum has. All traces are seeded.

What they show: ARC keeps a hot set through scans and tells the popular from the recent. What that costs: pools in which LRU happens
to be all but optimal, see ``shifting_fast``. A loop larger than the pool defeats all three: its ghosts are gone when it returns.
"""

import argparse
import heapq
import itertools
import json
import random
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from engine.eviction import EvictionPolicy, make_policy

Trace = Sequence[int]
POLICIES = ("fifo", "lru", "arc")
CAPACITIES = (1024, 2048, 4096, 8192)  # 8,192 pages are 128 Ki tokens


def loop(pages: int = 4500, rounds: int = 14) -> Trace:
    """``pages`` pages over and over: a batch of long jobs that take turns. A tenth more than a pool of 4,096."""
    return list(range(pages)) * rounds


def scan_over_hot_set(hot: int = 600, reads: int = 1200, scan: int = 6000, rounds: int = 10, seed: int = 0) -> Trace:
    """``reads`` uniform reads of a hot set, then one-time documents of ``scan`` pages (96 Ki tokens) in all; again and again."""
    rng, fresh = random.Random(seed), itertools.count(hot)
    trace: list[int] = []
    for _ in range(rounds):
        trace += rng.choices(range(hot), k=reads)
        trace += itertools.islice(fresh, scan)
    return trace


def zipf(pages: int = 20_000, reads: int = 70_000, exponent: float = 0.9, seed: int = 0) -> Trace:
    """Independent reads, the n-th page with a probability that goes as ``n ** -exponent``: some content is just more popular."""
    return random.Random(seed).choices(range(pages), cum_weights=_zipf_weights(pages, exponent), k=reads)


def shared_prefixes(prefixes: int = 48, jobs: int = 500, exponent: float = 0.9, seed: int = 0) -> Trace:
    """Jobs as a prefix cache sees them: the pages of a shared prefix in order, then a tail of its own that no one reads again.

    Prefixes have 64 to 256 pages (1 to 4 Ki tokens: system prompts, tools, examples) and Zipf popularity, tails 8 to 64 pages.
    """
    rng, fresh = random.Random(seed), itertools.count()
    heads = [list(itertools.islice(fresh, rng.randint(64, 256))) for _ in range(prefixes)]
    trace: list[int] = []
    for head in rng.choices(heads, cum_weights=_zipf_weights(prefixes, exponent), k=jobs):
        trace += head
        trace += itertools.islice(fresh, rng.randint(8, 64))
    return trace


def shifting(phases: int = 6, reads: int = 30_000, seed: int = 0) -> Trace:
    """Working sets that change: phases of recency and of frequency in turn, on pages of their own.

    Recency: a front moves on through fresh pages, and reads fall within 3,000 pages behind it (conversations that go on and end).
    Frequency: seven reads in ten go to 1,500 popular pages, three are one-time.
    """
    rng, fresh = random.Random(seed), itertools.count()
    trace: list[int] = []
    for phase in range(phases):
        if phase % 2 == 0:
            window = list(itertools.islice(fresh, 3000))
            for _ in range(reads):
                if rng.random() < 0.3:
                    window.append(next(fresh))
                trace.append(window[-rng.randint(1, 3000)])
        else:
            popular = list(itertools.islice(fresh, 1500))
            trace += (rng.choice(popular) if rng.random() < 0.7 else next(fresh) for _ in range(reads))
    return trace


def shifting_fast() -> Trace:
    """``shifting`` before ARC has learned: it loses about 4 % of LRU's hits here. In ``shifting`` the lessons pay.

    ``p`` starts at 0 and rises by about one for each ghost of T1 that returns: every page of the length that T1 should have costs
    one miss, once. Until then T2 holds on to phases that are over. 4,096 pages hold a whole working set, so that LRU is optimal and
    the lessons are pure loss. In 2,048 pages ARC loses in the phases of recency, where no page is popular, and a phase of frequency
    ends, after four reads a page, before it has won that back.
    """
    return shifting(phases=8, reads=9000)


TRACES: dict[str, Callable[[], Trace]] = {
    make.__name__: make for make in (loop, scan_over_hot_set, zipf, shared_prefixes, shifting, shifting_fast)
}


def _zipf_weights(count: int, exponent: float) -> list[float]:
    return list(itertools.accumulate((n + 1) ** -exponent for n in range(count)))


def hit_ratio(policy: str, trace: Trace, capacity: int) -> float:
    """Hits per read of a pool of ``capacity`` pages that starts empty, nothing pinned."""
    pool: EvictionPolicy[int] = make_policy(policy, capacity)
    hits = 0
    for page in trace:
        if page in pool:
            pool.hit(page)
            hits += 1
            continue
        if len(pool) == capacity:
            pool.victim(page, lambda _: True)
        pool.insert(page)
    return hits / len(trace)


def optimum(trace: Trace, capacity: int) -> float:
    """The most that any policy can have: the page needed furthest ahead leaves (Belady, IBM Systems Journal 5(2), 1966)."""
    never = len(trace)
    next_read, seen = [never] * len(trace), dict[int, int]()
    for at in range(len(trace) - 1, -1, -1):
        next_read[at] = seen.get(trace[at], never)
        seen[trace[at]] = at
    resident: dict[int, int] = {}  # page -> its next read
    furthest: list[tuple[int, int]] = []  # (-next read, page), with entries that are no longer true
    hits = 0
    for at, page in enumerate(trace):
        if page in resident:
            hits += 1
        elif len(resident) == capacity:
            needed, leaving = heapq.heappop(furthest)
            while resident.get(leaving) != -needed:
                needed, leaving = heapq.heappop(furthest)
            del resident[leaving]
        resident[page] = next_read[at]
        heapq.heappush(furthest, (-next_read[at], page))
    return hits / len(trace)


def compare() -> dict[str, dict[int, dict[str, float]]]:
    """trace -> capacity -> policy or "optimum" -> hit ratio."""
    result: dict[str, dict[int, dict[str, float]]] = {}
    for name, make in TRACES.items():
        trace = make()
        result[name] = {
            capacity: {policy: hit_ratio(policy, trace, capacity) for policy in POLICIES} | {"optimum": optimum(trace, capacity)}
            for capacity in CAPACITIES
        }
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write the result here too")
    arguments = parser.parse_args()
    result = compare()
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")
    columns = (*POLICIES, "optimum")
    print(f"{'hit ratio in %':<18} {'pages':>6} " + " ".join(f"{column:>8}" for column in columns))
    for name, capacities in result.items():
        for capacity, ratios in capacities.items():
            print(f"{name:<18} {capacity:>6} " + " ".join(f"{100 * ratios[column]:8.2f}" for column in columns))
    return 0


if __name__ == "__main__":
    sys.exit(main())
