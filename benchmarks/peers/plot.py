"""Draws the medians beside what memory and arithmetic allow."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib import pyplot as plt

from benchmarks.peers.report import Row
from benchmarks.plot import COLOURS, STYLE

_COLOURS = (*COLOURS, "#cf222e")


def draw(rows: Sequence[Row], path: Path) -> None:
    """One panel for each case: a bar for each peer, a line above it for its limit."""
    cases = list(dict.fromkeys(row.case for row in rows))
    peers = list(dict.fromkeys(row.peer for row in rows))
    colours = dict(zip(peers, _COLOURS, strict=False))
    with plt.rc_context(STYLE):
        figure, grid = plt.subplots(-(-len(cases) // 4), min(4, len(cases)), figsize=(12, 6), layout="constrained", squeeze=False)
        for axes in grid.flat[len(cases) :]:
            axes.set_visible(False)
        for axes, case in zip(grid.flat, cases, strict=False):
            of_case = [row for row in rows if row.case == case]
            speeds = [row.tok_per_s for row in of_case]
            axes.bar(range(len(of_case)), speeds, 0.7, color=[colours[row.peer] for row in of_case])
            limits = [row.limit for row in of_case]
            axes.hlines(
                limits, [at - 0.35 for at in range(len(limits))], [at + 0.35 for at in range(len(limits))], "black", "dotted"
            )
            for at, row in enumerate(of_case):
                axes.annotate(
                    f"{row.tok_per_s:.0f}\n{row.share:.0%}",
                    (at, row.tok_per_s),
                    (0, 2),
                    textcoords="offset points",
                    ha="center",
                    fontsize=7,
                )
            axes.set_xticks(range(len(of_case)), [row.peer for row in of_case], rotation=30, ha="right")
            axes.set(title=case, ylabel="tok/s", ylim=(0, 1.3 * max(speeds)))  # a far limit would flatten the bars
        figure.suptitle(
            "tok/s and the share of what memory (decode) and fp32 arithmetic (fp32 decode, prefill) allow; dotted where it is near"
        )
        figure.savefig(path, dpi=150)
        plt.close(figure)
