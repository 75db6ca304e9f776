"""``python -m chaos``: kill everything, again and again, and see whether the promises hold. Exit code 0 only when all did."""

import argparse
import secrets
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from random import Random

from chaos.cluster import ROOT, ClusterOptions, private_place
from chaos.guarantees import ALWAYS
from chaos.models import model_for
from chaos.reference import reference
from chaos.report import Row, keep, print_row, print_table
from chaos.scenarios import SCENARIOS, TIERS, Scenario
from chaos.stage import perform
from chaos.workload import DEMO, TINY, Catalogue

_CASES = 18
_REPORT = ROOT / "chaos-report"


def main() -> int:
    arguments = _parser().parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # as Ctrl-C: what was started is ended
    seed = arguments.seed if arguments.seed is not None else secrets.randbelow(1 << 32)
    chosen = [scenario for scenario in SCENARIOS if arguments.scenario is None or scenario.name in arguments.scenario]
    print(f"chaos: tier {arguments.tier}, seed {seed}, model {arguments.model}", flush=True)
    base = Path(tempfile.mkdtemp(prefix="chaos-"))  # short: a socket lies under it
    try:
        rows = _run_all(base, arguments, chosen, seed)
    finally:
        shutil.rmtree(base, ignore_errors=True)
    print_table(rows, len(ALWAYS))
    if bad := [row for row in rows if not row.outcome.good]:
        print(f"\nFAILED: {', '.join(f'{row.scenario} run {row.run}' for row in bad)}; seed {seed}; kept in {_REPORT}")
        return 1
    return 0


def _run_all(base: Path, arguments: argparse.Namespace, chosen: list[Scenario], seed: int) -> list[Row]:
    model = model_for(arguments.model, base)
    size = TINY if arguments.model == "tiny" else DEMO
    started = time.monotonic()
    catalogue = reference(private_place(base, "ref"), ClusterOptions(model), Random(f"{seed} reference"), size, _CASES)
    tokens = sum(len(answer.token_ids) for answer in catalogue.answers.values())
    print(f"reference: {len(catalogue.cases)} cases, {tokens} tokens, {time.monotonic() - started:.0f} s", flush=True)
    rows = []
    for scenario in chosen:
        runs = arguments.runs if arguments.runs is not None else scenario.runs[arguments.tier]
        for run in range(runs):
            rows.append(_run(base, scenario, catalogue, model, arguments, seed, run))
    return rows


def _run(
    base: Path, scenario: Scenario, catalogue: Catalogue, model: str, arguments: argparse.Namespace, seed: int, run: int
) -> Row:
    place = private_place(base, f"{scenario.name[:12]}-{run}")
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
    parser.add_argument("--runs", type=int, help="runs of each scenario, instead of the tier's number")
    return parser


if __name__ == "__main__":
    sys.exit(main())
