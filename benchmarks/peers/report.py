"""From rounds to medians, ratios and a table."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.peers.cases import Case
from benchmarks.peers.limits import Machine, Reads, Shape, limit
from benchmarks.peers.process import DISTURBED


@dataclass(frozen=True)
class Figure:
    """One measurement."""

    tok_per_s: float
    others: float  #: cores that other processes of this machine took meanwhile


@dataclass(frozen=True)
class Round:
    machine: Machine
    figures: Mapping[str, Mapping[str, Figure]]  #: peer -> case -> what was measured


@dataclass(frozen=True)
class Row:
    """Medians over rounds of one peer in one case. A ratio is that of one round: both sides saw the same machine."""

    case: str
    peer: str
    tok_per_s: float
    limit: float  #: tok/s
    share: float  #: of the limit
    ratios: Mapping[str, float]  #: variant of ours -> its speed over this peer's


def figure(case: Case, answer: Mapping[str, Any]) -> Figure:
    """From what a process answered."""
    if case.is_prefill:
        speed = case.batch * case.context / answer["prefill_seconds"]
    else:
        speed = answer["decode_tokens"] / answer["decode_seconds"]
    return Figure(speed, answer["others"])


def summarise(cases: Sequence[Case], rounds: Sequence[Round], shape: Shape, reads: Mapping[str, Reads]) -> list[Row]:
    """Rows by case, then by peer in the order of ``reads``. What was never measured has none."""
    rows = []
    for case in cases:
        speeds = {
            peer: {number: r.figures[peer][case.name].tok_per_s for number, r in enumerate(rounds) if case.name in r.figures[peer]}
            for peer in reads
        }
        for peer, own in speeds.items():
            if not own:
                continue
            limits = {number: limit(case, shape, reads[peer], rounds[number].machine) for number in own}
            ratios = {
                ours: statistics.median(theirs[number] / own[number] for number in common)
                for ours, theirs in speeds.items()
                if is_ours(ours) and not is_ours(peer) and (common := own.keys() & theirs.keys())
            }
            share = statistics.median(own[number] / limits[number] for number in own)
            median, allowed = statistics.median(own.values()), statistics.median(limits.values())
            rows.append(Row(case.name, peer, median, allowed, share, ratios))
    return rows


def is_ours(peer: str) -> bool:
    return peer.startswith("ours-")


def disturbed(rounds: Sequence[Round]) -> tuple[int, int]:
    """Measurements that other processes disturbed, and all of them."""
    others = [f.others for r in rounds for figures in r.figures.values() for f in figures.values()]
    return sum(share > DISTURBED for share in others), len(others)


def table(rows: Sequence[Row], ours: Sequence[str]) -> str:
    """In Markdown, widths aligned."""
    lines = [["case", "peer", "tok/s", "limit", "of the limit", *(f"{name} / peer" for name in ours)]]
    for row in rows:
        ratios = [f"{row.ratios[name]:.2f}" if name in row.ratios else "" for name in ours]
        lines.append([row.case, row.peer, f"{row.tok_per_s:.1f}", f"{row.limit:.0f}", f"{row.share:.0%}", *ratios])
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    rule = ["-" * width if column < 2 else "-" * (width - 1) + ":" for column, width in enumerate(widths)]

    def text(line: Sequence[str]) -> str:
        cells = [
            cell.ljust(width) if at < 2 else cell.rjust(width) for at, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        return f"| {' | '.join(cells)} |"

    return "\n".join(map(text, [lines[0], rule, *lines[1:]]))


def notes(rounds: Sequence[Round], unavailable: Mapping[str, str]) -> str:
    """What stands under the table."""
    bandwidth = statistics.median(r.machine.bytes_per_s for r in rounds) / 1e9
    flops = statistics.median(r.machine.flops_per_s for r in rounds) / 1e9
    bad, total = disturbed(rounds)
    lines = [f"Machine: {bandwidth:.1f} GB/s read from memory, {flops:.0f} GFLOP/s fp32, medians of {len(rounds)} rounds."]
    if bad:
        lines.append(f"Disturbed: other processes took more than {DISTURBED} cores during {bad} of {total} measurements.")
    lines += [f"Not measured: {name}: {reason}" for name, reason in unavailable.items()]
    return "\n".join(lines)
