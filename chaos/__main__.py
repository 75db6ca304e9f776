"""``python -m chaos``: kill everything, again and again, and see whether the promises hold. Exit code 0 only when all did."""

import argparse
import math
import os
import secrets
import shutil
import signal
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from chaos.guarantees import ALWAYS
from chaos.hunt import hunt, print_mistakes
from chaos.mistakes import MISTAKES
from chaos.models import model_for
from chaos.place import ROOT, ClusterOptions, private_place
from chaos.points import FEWEST, rare_points
from chaos.processes import beside
from chaos.reference import reference
from chaos.report import Row, Suite, keep, print_row, print_table, write_report
from chaos.scenario import TIERS, Scenario
from chaos.scenarios import SCENARIOS
from chaos.stage import perform
from chaos.workload import DEMO, TINY, Catalogue

_CASES = 18
_REPORT = ROOT / "chaos-report"


def main() -> int:
    arguments = _parser().parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # as Ctrl-C: what was started is ended
    began = time.time()
    seed = arguments.seed if arguments.seed is not None else secrets.randbelow(1 << 32)
    wanted = [scenario for scenario in SCENARIOS if arguments.scenario is None or scenario.name in arguments.scenario]
    skipped = {scenario.name: why for scenario in wanted if (why := scenario.cannot_run())}
    chosen = [scenario for scenario in wanted if scenario.name not in skipped]
    print(f"chaos: tier {arguments.tier}, seed {seed}, model {arguments.model}", flush=True)
    for name, why in skipped.items():
        print(f"skipped {name}: {why}", flush=True)
    base = Path(tempfile.mkdtemp(prefix="chaos-"))  # short: a socket lies under it
    try:
        if arguments.mistakes is not None:
            return _find_mistakes(base, arguments, seed)
        rows, left_out = _run_all(base, arguments, chosen, seed)
    finally:
        shutil.rmtree(base, ignore_errors=True)
    print_table(rows, len(ALWAYS))
    suite = Suite(arguments.tier, seed, arguments.model, began, time.time() - began, tuple(rows), tuple(left_out))
    if arguments.json is not None:
        write_report(arguments.json, suite)
    if left_out:
        print(f"\nNot begun within {arguments.minutes:g} minutes: {', '.join(left_out)}. Without --minutes nothing is left out.")
    if bad := [row for row in rows if not row.outcome.good]:
        print(f"\nFAILED: {', '.join(f'{row.scenario} run {row.run}' for row in bad)}; seed {seed}; kept in {_REPORT}")
        return 1
    if skipped and arguments.tier != "quick":
        print(f"\nFAILED: tier {arguments.tier} is proof only when nothing is skipped: {', '.join(skipped)}")
        return 1
    whole = arguments.scenario is arguments.faults is arguments.runs is None and not left_out
    if whole and arguments.tier != "quick" and (rare := rare_points(suite.failpoints)):
        print(f"\nFAILED: named points that fired fewer than {FEWEST} times: {rare}")
        return 1
    return 0


def _catalogue(base: Path, name: str, seed: int) -> tuple[str, Catalogue]:
    """The model, and the right answers."""
    model = model_for(name, base)
    size = TINY if name == "tiny" else DEMO
    started = time.monotonic()
    catalogue = reference(private_place(base, "ref"), ClusterOptions(model), Random(f"{seed} reference"), size, _CASES)
    tokens = sum(len(answer.token_ids) for answer in catalogue.answers.values())
    print(f"reference: {len(catalogue.cases)} cases, {tokens} tokens, {time.monotonic() - started:.0f} s", flush=True)
    return model, catalogue


def _run_all(base: Path, arguments: argparse.Namespace, chosen: list[Scenario], seed: int) -> tuple[list[Row], list[str]]:
    """What was run, in the order of the scenarios, and what was not begun in time."""
    deadline = time.monotonic() + 60 * arguments.minutes
    model, catalogue = _catalogue(base, arguments.model, seed)
    runs = [
        (scenario, run)
        for scenario in chosen
        for run in range(arguments.runs if arguments.runs is not None else scenario.runs[arguments.tier])
    ]
    Random(f"{seed} order").shuffle(runs)  # so that it is not always the same ones for which there is no time
    if math.isinf(deadline):
        runs.sort(key=lambda each: -each[0].seconds)  # all end the soonest
    found = beside(
        arguments.parallel,
        [partial(_run_in_time, deadline, base, scenario, catalogue, model, arguments, seed, run) for scenario, run in runs],
    )
    rows = sorted((row for row in found if row is not None), key=lambda row: (_place(row.scenario), row.run))
    return rows, [f"{scenario.name} run {run}" for (scenario, run), row in zip(runs, found, strict=True) if row is None]


def _place(name: str) -> int:
    return next(number for number, scenario in enumerate(SCENARIOS) if scenario.name == name)


def _find_mistakes(base: Path, arguments: argparse.Namespace, seed: int) -> int:
    """Each known mistake must be found. The exit code."""
    model, catalogue = _catalogue(base, arguments.model, seed)
    wanted = [mistake for mistake in MISTAKES if not arguments.mistakes or mistake.name in arguments.mistakes]
    found = hunt(base, model, catalogue, seed, arguments.parallel, wanted)
    print_mistakes(wanted, found)
    missed = [name for name, sign in found.items() if not sign]
    print(f"\n{len(found) - len(missed)} of {len(found)} mistakes found; missed: {', '.join(missed) or 'none'}")
    return 1 if missed else 0


def _run_in_time(deadline: float, base: Path, scenario: Scenario, *rest: Any) -> Row | None:
    return _run(base, scenario, *rest) if time.monotonic() + scenario.seconds < deadline else None


def _run(
    base: Path, scenario: Scenario, catalogue: Catalogue, model: str, arguments: argparse.Namespace, seed: int, run: int
) -> Row:
    place = private_place(base, f"{_place(scenario.name)}-{run}")  # short: a socket lies under it
    faults = arguments.faults if arguments.faults is not None else scenario.faults[arguments.tier]
    rng = Random(f"{seed} {scenario.name} {run}")
    started = time.monotonic()
    outcome = perform(
        place, scenario.options(model), catalogue, scenario.script, rng=rng, faults=faults, checkers=scenario.checkers
    )
    row = Row(scenario.name, run, seed, time.monotonic() - started, outcome)
    print_row(row)
    if not outcome.good:
        again = f"python -m chaos --tier {arguments.tier} --seed {seed} --scenario {scenario.name} --model {arguments.model}"
        print(f"          seed {seed}, kept in {keep(row, place, _REPORT, again)}\n          again: {again}", flush=True)
    shutil.rmtree(place, ignore_errors=True)
    return row


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m chaos", description=__doc__)
    parser.add_argument("--tier", choices=TIERS, default="quick", help="how much: quick (12 minutes), ci, soak")
    parser.add_argument("--seed", type=int, help="of all that is random here; printed, and drawn when left out")
    parser.add_argument(
        "--scenario", action="append", choices=[scenario.name for scenario in SCENARIOS], help="only this one; may be repeated"
    )
    parser.add_argument("--model", default="tiny", help="tiny (default), demo, or a folder")
    parser.add_argument("--faults", type=int, help="faults in each run, instead of the tier's number")
    parser.add_argument(
        "--mistakes", nargs="*", metavar="NAME", choices=[mistake.name for mistake in MISTAKES],
        help="put known mistakes back, all or these, and see whether each is found",
    )  # fmt: skip
    parser.add_argument("--parallel", type=int, default=1 + (os.cpu_count() or 1), help="runs at once; default: cores + 1")
    parser.add_argument(
        "--minutes",
        type=float,
        default=math.inf,
        help="in random order, begin nothing that usually ends later: what is left out is said, and is no failure",
    )
    parser.add_argument("--json", type=Path, help="write a report here, and as a page beside it (.md)")
    parser.add_argument("--runs", type=int, help="runs of each scenario, instead of the tier's number")
    return parser


if __name__ == "__main__":
    sys.exit(main())
