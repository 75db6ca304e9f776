"""Draws a result. Equal results give equal files."""

import json
import statistics
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # before pyplot: no display

from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from benchmarks.durability.timeline import PARTS
from benchmarks.plot import OTHER, OURS, STYLE, THIRD, bars, note

Raw = Mapping[str, Any]


def throughput(axes: Axes, raw: Raw) -> None:
    sides = {"checkpoints": "checkpoints", "none": "--host-pages 0"}
    bars(
        axes, list(raw), {label: [_median(rounds, side) for rounds in raw.values()] for side, label in sides.items()}, (OURS, OTHER)
    )
    axes.set(title="Throughput after prefill", xlabel="jobs at once", ylabel="tok/s")
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1))


def restore(axes: Axes, raw: Raw) -> None:
    sides = ("restored", "recomputed", "replayed")
    bars(axes, list(raw), {side: [_median(rounds, side) for rounds in raw.values()] for side in sides}, (OURS, THIRD, OTHER))
    for index, rounds in enumerate(raw.values()):
        note(axes, index, _median(rounds, "recomputed"), f"{_median(rounds, 'recomputed') / _median(rounds, 'restored'):.0f}×")
    axes.set(title="Pages back from the pool file, or computed again", xlabel="tokens", ylabel="seconds", yscale="log")
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1))


def kill(axes: Axes, raw: Raw) -> None:
    left = [0.0] * len(raw)
    colours = plt.get_cmap("tab20").colors  # type: ignore[attr-defined]
    for part, colour in zip(PARTS, colours, strict=False):
        values = [statistics.median(trial["parts"][part] for trial in trials) for trials in raw.values()]
        axes.barh(list(raw), values, 0.6, left=left, color=colour, label=part.replace("_", " "))
        left = [before + value for before, value in zip(left, values, strict=True)]
    axes.set(title="From SIGKILL of the engine to a client's next token", xlabel="seconds", ylabel="jobs")
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), fontsize=7)


def memory(axes: Axes, raw: Raw) -> None:
    for key, colour in (("VmRSS", OURS), ("RssAnon", OTHER)):
        axes.plot([s["jobs"] for s in raw["samples"]], [s[key] / 2**20 for s in raw["samples"]], ".-", color=colour, label=key)
    axes.set(title="The engine over short jobs", xlabel="jobs", ylabel="MiB", ylim=(0, None))
    axes.legend(loc="lower right")


PANELS: dict[str, Callable[[Axes, Raw], None]] = {draw.__name__: draw for draw in (throughput, restore, kill, memory)}


def _median(rounds: list[dict[str, float]], side: str) -> float:
    return statistics.median(r[side] for r in rounds)


def draw(result: Path, picture: Path) -> None:
    """One panel for each section that was measured and has something to show."""
    sections = json.loads(result.read_text())["sections"]
    names = [name for name in PANELS if sections.get(name, {}).get("raw")]
    if not names:
        return
    plt.rcParams.update(STYLE)
    figure, grid = plt.subplots(len(names), 1, figsize=(9, 3.2 * len(names)), layout="constrained", squeeze=False)
    for axes, name in zip(grid.flat, names, strict=True):
        PANELS[name](axes, sections[name]["raw"])
    figure.savefig(picture, dpi=120, metadata={"Software": None})
    plt.close(figure)
