"""Runs known mistakes, one after the other, each where it is to be found."""

import queue
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random

from chaos.cluster import Cluster
from chaos.mistakes import MISTAKES, InModule, InScenario, Mistake, copy_sources, put_back
from chaos.place import ClusterOptions, private_place
from chaos.processes import beside
from chaos.scenarios import SCENARIOS
from chaos.stage import Outcome, perform
from chaos.workload import Catalogue

_FIRST_START = 900.0  #: kernels are compiled once for each place that sources lie in
_MODULE_TIMEOUT = 900.0
_SHOWN = 120  #: characters of a sign in the table


def hunt(
    base: Path, model: str, catalogue: Catalogue, seed: int, parallel: int, mistakes: Sequence[Mistake] = MISTAKES
) -> dict[str, str]:
    """Mistake -> what gave it away, in words; empty where nothing did."""
    copies: queue.SimpleQueue[Path] = queue.SimpleQueue()
    for copy in beside(parallel, [partial(_warm_copy, base, model, number) for number in range(parallel)]):
        copies.put(copy)

    def find(mistake: Mistake) -> str:
        copy = copies.get()
        started = time.monotonic()
        try:
            with put_back(mistake, copy):
                if isinstance(mistake.where, InModule):
                    signs = look_in_module(mistake.where, copy)
                else:
                    signs = _in_scenario(mistake.where, base, copy, model, catalogue, Random(f"{seed} {mistake.name}"))
        finally:
            copies.put(copy)
        return _judge(mistake, signs, time.monotonic() - started)

    found = beside(parallel, [partial(find, mistake) for mistake in mistakes])
    return {mistake.name: sign for mistake, sign in zip(mistakes, found, strict=True)}


def _warm_copy(base: Path, model: str, number: int) -> Path:
    copy = copy_sources(private_place(base, f"src-{number}"))
    with Cluster(private_place(base, f"warm-{number}"), ClusterOptions(model, root=copy)) as cluster:
        cluster.serve(wait=False)
        cluster.wait_ready(_FIRST_START)
        cluster.stop()
    return copy


def look_in_module(where: InModule, copy: Path) -> list[str]:
    """What it saw broken; or, when that is nothing, how it ended: the sign of no mistake."""
    done = subprocess.run(
        [sys.executable, "-m", where.name, *where.arguments],
        cwd=copy, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_MODULE_TIMEOUT, check=False,
    )  # fmt: skip
    violations = re.findall(r"Violation: (.*)", done.stdout)
    return violations or [f"{where.name} ended with {done.returncode}: {done.stdout[-200:]}{done.stderr[-200:]}"]


def _in_scenario(where: InScenario, base: Path, copy: Path, model: str, catalogue: Catalogue, rng: Random) -> list[str]:
    scenario = next(scenario for scenario in SCENARIOS if scenario.name == where.name)
    options = scenario.options(model)
    options = replace(options, root=copy, settings={**options.settings, **where.settings})
    place = private_place(base, f"{copy.name}-run")
    outcome = perform(place, options, catalogue, scenario.script, rng=rng, faults=where.faults, checkers=scenario.checkers)
    shutil.rmtree(place, ignore_errors=True)
    return _signs(outcome)


def _signs(outcome: Outcome) -> list[str]:
    """Faults that did not fire and runs that did not come to their end are signs, too, where a mistake calls them its own."""
    silent = [f"did not fire: {fault.name}: {fault.proof}" for fault in outcome.faults if not fault.fired]
    return [*map(str, outcome.violations), *silent, *outcome.problems]


def _judge(mistake: Mistake, signs: Sequence[str], seconds: float) -> str:
    """The first sign that is the mistake's own; empty when there is none."""
    own = mistake.own(signs)
    print(f"{'found' if own else 'MISSED':7} {mistake.name}: {mistake.where.name}, {seconds:.0f} s", flush=True)
    for sign in (own or signs)[:2]:
        print(f"          {'' if own else 'but: '}{sign[:240]}", flush=True)
    return own[0] if own else ""


def print_mistakes(mistakes: Sequence[Mistake], found: Mapping[str, str]) -> None:
    """As the table in README.md."""
    print("\n| mistake | found by |\n| --- | --- |")
    for mistake in mistakes:
        sign = found[mistake.name].replace("\n", " ")
        print(f"| {mistake.name} | `{mistake.where}`: {sign[:_SHOWN] or '**missed**'} |")
