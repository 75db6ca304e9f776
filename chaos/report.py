"""The table at the end, and what is kept of a failed run."""

import contextlib
import json
import re
import shutil
import threading
from collections import Counter
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from chaos.page import page
from chaos.points import ALL_POINTS
from chaos.stage import Outcome

_SHOWN = 12  #: violations of one run that are printed; all are in the kept files


@dataclass(frozen=True, slots=True)
class Row:
    """One run of one scenario."""

    scenario: str
    run: int
    seed: int
    seconds: float
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class Suite:
    """All that one call ran."""

    tier: str
    seed: int
    model: str
    began: float  #: seconds of the wall clock
    seconds: float
    rows: tuple[Row, ...]
    left_out: tuple[str, ...] = ()  #: runs that were not begun in the minutes given

    @property
    def failpoints(self) -> Counter[str]:
        """How often each named point fired, over all runs."""
        return sum((row.outcome.failpoints for row in self.rows), Counter())


_PRINTING = threading.Lock()


def print_row(row: Row) -> None:
    with _PRINTING:  # runs beside each other end when they like
        _print_row(row)


def _print_row(row: Row) -> None:
    outcome = row.outcome
    fired = sum(fault.fired for fault in outcome.faults)
    verdict = "ok" if outcome.good else "FAILED"
    print(
        f"{verdict:7} {row.scenario:18} run {row.run}  {fired}/{len(outcome.faults)} faults fired  {outcome.jobs} jobs  "
        f"{outcome.tokens} tokens  {len(outcome.violations)} violations  {row.seconds:.0f} s",
        flush=True,
    )
    for note in outcome.notes:
        print(f"          {note}")
    for problem in outcome.problems:
        print(f"          problem: {problem}")
    if not outcome.faults:
        print("          no fault was inflicted")
    for fault in outcome.faults:
        if not fault.fired:
            print(f"          did not fire: {fault.name}: {fault.proof}")
    for violation in outcome.violations[:_SHOWN]:
        print(f"          {violation}")
    if len(outcome.violations) > _SHOWN:
        print(f"          … and {len(outcome.violations) - _SHOWN} more")


def print_table(rows: list[Row], guarantees: int) -> None:
    print(f"\n{'scenario':18} {'runs':>4} {'faults':>7} {'fired':>6} {'jobs':>6} {'tokens':>8} {'violations':>11} {'seconds':>8}")
    for name in dict.fromkeys(row.scenario for row in rows):
        _print_line(name, [row for row in rows if row.scenario == name])
    _print_line("all", rows)
    print(f"{guarantees} guarantees checked in every run, and more where a scenario says so.")


def _print_line(name: str, rows: list[Row]) -> None:
    faults = [fault for row in rows for fault in row.outcome.faults]
    fired = sum(fault.fired for fault in faults)
    jobs, tokens = sum(row.outcome.jobs for row in rows), sum(row.outcome.tokens for row in rows)
    violations = sum(len(row.outcome.violations) for row in rows)
    seconds = sum(row.seconds for row in rows)
    print(f"{name:18} {len(rows):4} {len(faults):7} {fired:6} {jobs:6} {tokens:8} {violations:11} {seconds:8.0f}")


def keep(row: Row, place: Path, report: Path, command: str) -> Path:
    """Copy logs, history and verdict of a failed run to where it can be studied. The data directory too: it is the evidence."""
    kept = report / f"{row.scenario}-{row.seed}-{row.run}"
    shutil.rmtree(kept, ignore_errors=True)
    with contextlib.suppress(shutil.Error):  # a disk whose power is off gives nothing back; what is beside it counts
        shutil.copytree(place, kept, ignore=shutil.ignore_patterns("*.sock", "*.img"), ignore_dangling_symlinks=True)
    outcome = asdict(replace(row.outcome, failpoints=Counter()))  # of a Counter it makes another, with keys that are no JSON
    outcome["failpoints"] = dict(row.outcome.failpoints)
    verdict = {"again": command, "seconds": row.seconds, **outcome}
    (kept / "verdict.json").write_text(json.dumps(verdict, indent=1, ensure_ascii=False))
    return kept


def write_report(path: Path, suite: Suite) -> None:
    """JSON, and the same as a page beside it: runs, faults fired by kind, failures."""
    report: dict[str, Any] = {
        "tier": suite.tier,
        "seed": suite.seed,
        "model": suite.model,
        "date": datetime.fromtimestamp(suite.began, UTC).date().isoformat(),
        "seconds": round(suite.seconds),
        "left_out": list(suite.left_out),
        "failpoints": {point: suite.failpoints[point] for point in ALL_POINTS},
        "scenarios": [_of_scenario(suite, name) for name in dict.fromkeys(row.scenario for row in suite.rows)],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n")
    path.with_suffix(".md").write_text(page(report))


def _of_scenario(suite: Suite, name: str) -> dict[str, object]:
    outcomes = [row.outcome for row in suite.rows if row.scenario == name]
    faults = [fault for outcome in outcomes for fault in outcome.faults]
    return {
        "name": name,
        "runs": len(outcomes),
        "faults": len(faults),
        "fired": sum(fault.fired for fault in faults),
        "by_fault": dict(Counter(kind_of(fault.name) for fault in faults if fault.fired)),
        "jobs": sum(outcome.jobs for outcome in outcomes),
        "tokens": sum(outcome.tokens for outcome in outcomes),
        "violations": [str(violation) for outcome in outcomes for violation in outcome.violations],
        "problems": [problem for outcome in outcomes for problem in outcome.problems],
        "notes": [note for outcome in outcomes for note in outcome.notes],
    }


def kind_of(fault: str) -> str:
    """A fault's name without what differs from one to the next: numbers of hits, pages, bytes, seconds."""
    return re.sub(r"@\d+|(?<=\s)[\d.]+(?=\s|$)", lambda match: "" if match[0].startswith("@") else "N", fault)
