"""The figures of ``make bench`` as Markdown tables. ``python -m benchmarks.report bench-results``

Sides and quantities are those of ``extra_info``; a ratio is our speed over the other side's: medians over the rounds of one run.
"""

import argparse
import statistics
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from benchmarks.results import Results

Row = Sequence[object]


def text(cell: object) -> str:
    if not isinstance(cell, float):
        return str(cell)
    return f"{cell:,.0f}" if cell >= 100 else f"{cell:.3g}"


def table(title: str, header: Row, rows: Iterable[Row]) -> Iterator[str]:
    yield f"\n## {title}\n"
    for row in (header, ["---"] * len(header), *rows):
        yield "| " + " | ".join(map(text, row)) + " |"


def swap(results: Results) -> Iterator[str]:
    rows = []
    for m in results.of("test_memory") + results.of("test_file"):
        case = (m.test.removeprefix("test_"), m.params["direction"], m.params["page"], m.params["order"])
        speeds = [m.info["bytes"] / m.seconds(side) / 1e9 for side in m.info["seconds"]]
        rows.append((*case, m.ratio("plain"), m.ratio("checked"), *speeds))
    header = (
        "host pool",
        "direction",
        "page",
        "order",
        "ours / plain",
        "ours / checked",
        "ours, GB/s",
        "plain",
        "checked",
        "mapping",
    )
    return table(f"Swap (goal {results.of('test_memory')[0].info['goal']})", header, rows)


def batch(results: Results) -> Iterator[str]:
    measured = results.of("test_batch")
    rows = [
        (
            *(m.params["batch"], m.params["page_size"], m.ratio("naive")),
            *(m.of(side, quantity) for quantity in ("tok_per_s", "decode_tok_per_s") for side in ("ours", "naive")),
        )
        for m in measured
    ]
    header = ("batch", "page size", "ours / contiguous", "tok/s", "contiguous", "decode tok/s", "contiguous")
    yield from table("Batches", header, rows)
    yield f"\nThe median of these ratios is {statistics.median(m.ratio('naive') for m in measured):.3f}."


def scarce(results: Results) -> Iterator[str]:
    rows = [
        (
            *(m.params["batch"], m.params["page_size"], f"{m.params['share']:.0%}", m.ratio("all_pages")),
            *(m.of("ours", "tok_per_s"), m.of("all_pages", "tok_per_s")),
            *(m.of("ours", quantity) for quantity in ("sequences_at_once", "preempted", "pages_swapped_in")),
        )
        for m in results.of("test_scarce")
    ]
    header = ("jobs", "page size", "pages", "ratio", "tok/s", "with all pages", "at once", "preempted", "pages in")
    return table("Scarce pages", header, rows)


def memory(results: Results) -> Iterator[str]:
    m = results.one("test_same_memory")
    quantities = ("sequences_at_once", "most_at_once", "memory_used", "tok_per_s")
    rows = [(side, *(m.of(side, quantity) for quantity in quantities)) for side in ("ours", "naive")]
    yield from table(f"The same memory: {m.info['slots']:,} token slots", ("side", *quantities), rows)
    yield f"\nratio {m.ratio('naive'):.2f}; {m.info['jobs']} jobs, mean length {m.info['mean_length']:.0f}"


def pressure(results: Results) -> Iterator[str]:
    quantities = (
        "tok_per_s",
        "sequences_at_once",
        "preempted",
        "pages_swapped_out",
        "pages_swapped_in",
        "in_seconds",
        "stall_seconds",
    )
    measured = results.of("test_pressure")
    rows = [(m.params["budget"], side, *(m.of(side, q) for q in quantities)) for m in measured for side in ("ours", "capped")]
    yield from table("Pressure", ("budget", "side", *quantities), rows)
    for m in measured:
        hidden = f", {m.info['swap_in_hidden']:.1%} of the swap-in time hidden" if "swap_in_hidden" in m.info else ""
        yield f"\n{m.params['budget']}: ratio {m.ratio('capped'):.3f}{hidden}"


def grammar(results: Results) -> Iterator[str]:
    rows = []
    for m in results.of("test_grammar"):
        steps = [1e3 * m.params["batch"] / m.of(side, "decode_tok_per_s") for side in ("ours", "none")]
        rows.append((m.params["batch"], *steps, 1e3 * (steps[0] - steps[1]) / m.params["batch"], steps[1] / steps[0]))
    header = ("batch", "ms a step, with", "without", "difference, µs a token", "ratio")
    return table("A grammar", header, rows)


def prefix(results: Results) -> Iterator[str]:
    many, few, restart = (results.one(test) for test in ("test_many", "test_against_apart", "test_restart"))
    rows = [
        (f"{many.info['jobs']} jobs, shared", many.seconds("ours"), many.of("ours", "prompt_rows")),
        (f"{few.info['jobs']} jobs, shared", few.seconds("ours"), few.of("ours", "prompt_rows")),
        (f"{few.info['jobs']} jobs, apart", few.seconds("apart"), few.of("apart", "prompt_rows")),
        ("one more after a restart", restart.seconds("ours"), restart.of("ours", "prompt_rows")),
        ("one more, no pool file", restart.seconds("empty"), restart.of("empty", "prompt_rows")),
    ]
    yield from table("Prefix", ("", "seconds", "prompt rows"), rows)
    yield f"\nprompt rows for each unique one: {many.info['rows_for_each_unique']:.3f}; ratio {few.ratio('apart'):.2f} shared,"
    yield f"{restart.ratio('empty'):.2f} after a restart"


def eviction(results: Results) -> Iterator[str]:
    policies = ("fifo", "lru", "arc", "optimum")
    rows = [
        (trace, capacity, *(f"{100 * ratios[policy]:.2f}" for policy in policies))
        for trace, capacities in results.eviction.items()
        for capacity, ratios in capacities.items()
    ]
    return table("Eviction, hits in %", ("trace", "pages", *policies), rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path, help="the folder that `make bench` wrote to")
    results = Results(parser.parse_args().results)
    for section in (swap, batch, scarce, memory, pressure, grammar, prefix, eviction):
        for line in section(results):
            print(line)
    return 0


if __name__ == "__main__":
    sys.exit(main())
