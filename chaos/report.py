"""The table at the end, and what is kept of a failed run."""

import json
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

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


def print_row(row: Row) -> None:
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
    shutil.copytree(place, kept, ignore=shutil.ignore_patterns("*.sock"), ignore_dangling_symlinks=True)
    verdict = {"again": command, "seconds": row.seconds, **asdict(row.outcome)}
    (kept / "verdict.json").write_text(json.dumps(verdict, indent=1, ensure_ascii=False))
    return kept
