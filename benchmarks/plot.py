"""Draws what ``make bench`` measured. ``python -m benchmarks.plot bench-results [--publish docs/benchmarks]``

Equal results give equal files, byte for byte, so that a published plot changes only where a figure did.
"""

import argparse
import shutil
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # before pyplot: no display

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.results import Results

COLOURS = ("#1f6feb", "#9aa4b2", "#d29922", "#2da44e", "#8250df")
OURS, OTHER, THIRD = COLOURS[:3]
PAGE_COLOURS = (THIRD, OURS, *COLOURS[3:])
STYLE: dict[Any, Any] = {
    "svg.hashsalt": "midsentence",  # ids of clip paths are random otherwise
    "svg.fonttype": "none",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": "#e6e6e6",
    "legend.frameon": False,
}


def bars(axes: Axes, labels: Sequence[str], series: Mapping[str, Sequence[float]], colours: Sequence[str] = COLOURS) -> None:
    """Groups of bars: one group for each label, one bar in each for each of the series."""
    width = 0.8 / len(series)
    for index, (name, values) in enumerate(series.items()):
        at = [group - 0.4 + (index + 0.5) * width for group in range(len(labels))]
        axes.bar(at, values, width * 0.92, label=name, color=colours[index])
    axes.set_xticks(range(len(labels)), labels)


def note(axes: Axes, at: int, height: float, text: str) -> None:
    axes.annotate(text, (at, height), xytext=(0, 3), textcoords="offset points", ha="center", fontsize=8)


def swap(results: Results) -> Figure:
    figure, panels = plt.subplots(2, 1, figsize=(10, 6.5), layout="constrained")
    names = {
        "ours": "swap engine, checksummed",
        "checked": "copy and checksum, no more",
        "plain": "plain copy",
        "mapping": "plain copy to or from the mapping",
    }
    titles = {
        "test_memory": "Host pool in memory, against numpy.copyto (above: our share of the plain copy)",
        "test_file": "Pool file in the page cache, against pwrite and preadv",
    }
    for axes, (test, title) in zip(panels, titles.items(), strict=True):
        cases = results.of(test)
        labels = ["{direction}\n{page} page\n{order}".format(**m.params) for m in cases]
        sides = [side for side in names if side in cases[0].info["seconds"]]
        speeds = {names[side]: [m.info["bytes"] / m.seconds(side) / 1e9 for m in cases] for side in sides}
        bars(axes, labels, speeds, (OURS, COLOURS[4], OTHER, THIRD))
        for index, m in enumerate(cases):
            note(axes, index, max(series[index] for series in speeds.values()), f"{m.ratio('plain'):.2f}")
        axes.set(title=title, ylabel="GB/s")
        axes.margins(y=0.12)
        axes.legend(loc="upper left", bbox_to_anchor=(1, 1))
    return figure


def speed(results: Results) -> Figure:
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    batches = results.values("test_batch", "batch")
    labels = [str(batch) for batch in batches]
    for page_size, colour in zip(results.values("test_batch", "page_size"), PAGE_COLOURS, strict=True):
        of_size = [results.one("test_batch", batch=batch, page_size=page_size) for batch in batches]
        left.plot(labels, [m.of("ours", "decode_tok_per_s") for m in of_size], "o-", color=colour, label=f"pages of {page_size}")
    naive = [statistics.median(m.of("naive", "decode_tok_per_s") for m in results.of("test_batch", batch=b)) for b in batches]
    left.plot(labels, naive, "k--", label="contiguous")
    left.set(title="Decode, by batch and page size", xlabel="Sequences", ylabel="tok/s", ylim=(0, None))
    left.legend()

    scarce = results.values("test_scarce", "batch")
    series = {
        f"{share:.0%} of the pages": [
            results.one("test_scarce", batch=batch, page_size=16, share=share).of("ours", "tok_per_s") for batch in scarce
        ]
        for share in results.values("test_scarce", "share")
    }
    whole = [
        statistics.median(m.of("all_pages", "tok_per_s") for m in results.of("test_scarce", batch=b, page_size=16)) for b in scarce
    ]
    bars(right, [str(batch) for batch in scarce], {**series, "all pages": whole}, (THIRD, COLOURS[3], OURS))
    right.set(title="Device pages for a share of the jobs (pages of 16)", xlabel="jobs", ylabel="tok/s, prompts included")
    right.legend()
    return figure


def memory(results: Results) -> Figure:
    m = results.one("test_same_memory")
    figure, panels = plt.subplots(1, 3, figsize=(9, 3.4), layout="constrained")
    quantities = {
        "sequences_at_once": ("Sequences at once (mean)", 1.0),
        "memory_used": ("Taken memory that holds tokens, %", 100.0),
        "tok_per_s": ("tok/s", 1.0),
    }
    for axes, (quantity, (title, factor)) in zip(panels, quantities.items(), strict=True):
        values = [factor * m.of(side, quantity) for side in ("ours", "naive")]
        axes.bar(["pages of 16", "contiguous"], values, 0.6, color=(OURS, OTHER))
        for index, value in enumerate(values):
            note(axes, index, value, f"{value:.1f}")
        axes.set(title=title)
        axes.margins(y=0.12)
    figure.suptitle(
        f"The memory of {m.info['slots']:,} token slots: {m.info['jobs']} jobs, {m.info['mean_length']:.0f} tokens on average, "
        f"{m.info['max_length']} at most"
    )
    return figure


def pressure(results: Results) -> Figure:
    figure, axes = plt.subplots(figsize=(6.5, 4), layout="constrained")
    measured = results.of("test_pressure")
    titles = {"default": "room to grow (default)", "swap": "no room to grow,\nalways swap"}
    series = {"8 admitted": "capped", "32 admitted": "ours"}
    speeds = {name: [m.of(side, "tok_per_s") for m in measured] for name, side in series.items()}
    bars(axes, [titles[m.params["budget"]] for m in measured], speeds, (OTHER, OURS))
    for index, m in enumerate(measured):
        text = (
            f"{m.ratio('capped'):.2f}×, {m.of('ours', 'sequences_at_once'):.1f} at once, {m.of('ours', 'preempted'):.0f} preempted"
        )
        note(axes, index, max(values[index] for values in speeds.values()), text)
    axes.set(title="48 jobs, device pages for 8", ylabel="tok/s, prompts included")
    axes.margins(y=0.12)
    axes.legend(loc="lower right", framealpha=1, frameon=True)
    return figure


def prefix(results: Results) -> Figure:
    figure, (left, right) = plt.subplots(1, 2, figsize=(8, 3.6), layout="constrained")
    few, restart = results.one("test_against_apart"), results.one("test_restart")
    for axes, m, sides, title in (
        (left, few, {"apart": "not shared", "ours": "shared"}, f"{few.info['jobs']} jobs with one prompt of 1,024 tokens"),
        (right, restart, {"empty": "no pool file", "ours": "on the pool file"}, "One more job, after a restart"),
    ):
        values = [m.seconds(side) for side in sides]
        axes.bar(list(sides.values()), values, 0.6, color=(OTHER, OURS))
        for index, (side, value) in enumerate(zip(sides, values, strict=True)):
            note(axes, index, value, f"{value:.2f} s\n{m.of(side, 'prompt_rows'):,.0f} prompt rows")
        axes.set(title=title, ylabel="seconds to the last token")
        axes.margins(y=0.2)
    return figure


def eviction(results: Results) -> Figure:
    figure, grid = plt.subplots(2, 3, figsize=(10, 5.5), layout="constrained", sharey=True)
    styles = {"fifo": (OTHER, "-"), "lru": (THIRD, "-"), "arc": (OURS, "-"), "optimum": ("black", "--")}
    for axes, (trace, capacities) in zip(grid.flat, results.eviction.items(), strict=True):
        labels = [f"{int(capacity):,}" for capacity in capacities]
        for policy, (colour, line) in styles.items():
            ratios = [100 * ratios[policy] for ratios in capacities.values()]
            axes.plot(labels, ratios, line, marker=".", color=colour, label=policy.upper() if policy != "optimum" else "optimum")
        axes.set(title=trace.replace("_", " "), ylim=(0, 100))
    for axes in grid[:, 0]:
        axes.set_ylabel("hits, %")
    for axes in grid[-1]:
        axes.set_xlabel("pages in the pool")
    grid[0, 0].legend()
    return figure


PLOTS: dict[str, Callable[[Results], Figure]] = {draw.__name__: draw for draw in (swap, speed, memory, pressure, prefix, eviction)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path, help="the folder that `make bench` wrote to")
    parser.add_argument("--publish", type=Path, help="write the plots into this folder too")
    arguments = parser.parse_args()
    results = Results(arguments.results)
    plt.rcParams.update(STYLE)
    for name, draw in PLOTS.items():
        figure, path = draw(results), arguments.results / f"{name}.svg"
        figure.savefig(path, metadata={"Date": None, "Creator": None})
        plt.close(figure)
        if arguments.publish:
            arguments.publish.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, arguments.publish)
    return 0


if __name__ == "__main__":
    sys.exit(main())
