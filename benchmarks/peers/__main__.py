"""Measures our engine and its peers in turns. ``python -m benchmarks.peers --peers hf,vllm,llamacpp --ours fp32,int8``

Writes ``bench-results/peers.json`` and a plot beside it, prints a table. What cannot be installed or started is named with
its reason.
"""

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.peers.cases import Case, make_cases
from benchmarks.peers.environments import Unavailable
from benchmarks.peers.limits import Machine, Shape
from benchmarks.peers.lineup import BYTES, PEERS, Entry, machine_command, make_entry, name_of_ours
from benchmarks.peers.plot import draw
from benchmarks.peers.process import ROOT, Process
from benchmarks.peers.report import Figure, Round, figure, notes, summarise, table
from engine import model_source

CASE_NAMES = [case.name for case in make_cases(1)]
WARM_UP_TOKENS, WARM_UP_PROMPTS = 2, 2048  #: new tokens of each sequence, prompt tokens of all at most


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    def names_from(known: Sequence[str]) -> Any:
        def names(text: str) -> list[str]:
            chosen = [name for name in text.split(",") if name]
            if unknown := [name for name in chosen if name not in known]:
                raise argparse.ArgumentTypeError(f"unknown: {', '.join(unknown)}; known: {', '.join(known)}")
            return list(dict.fromkeys(chosen))

        return names

    def positive(text: str) -> int:
        if int(text) < 1:
            raise argparse.ArgumentTypeError("must be at least 1")
        return int(text)

    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=__doc__)
    parser.add_argument("--peers", type=names_from(PEERS), default=list(PEERS), help=f"of {','.join(PEERS)}")
    parser.add_argument("--ours", type=names_from(tuple(BYTES)), default=["fp32", "int8"], help=f"of {','.join(BYTES)}")
    parser.add_argument("--cases", type=names_from(CASE_NAMES), default=CASE_NAMES, help=f"of {','.join(CASE_NAMES)}")
    parser.add_argument("--rounds", type=positive, default=5)
    parser.add_argument("--tokens", type=positive, default=64, help="measured decode steps of each case")
    parser.add_argument("--quick", action="store_true", help="one round of 8 tokens: shows that all runs")
    parser.add_argument("--envs", type=Path, default=cache / "midsentence" / "peers", help="where the peers are installed")
    parser.add_argument("--json", type=Path, default=ROOT / "bench-results" / "peers.json", help="the plot goes beside it")
    chosen = parser.parse_args(arguments)
    chosen.envs, chosen.json = chosen.envs.absolute(), chosen.json.absolute()
    if chosen.quick:
        chosen.rounds, chosen.tokens = 1, 8
    return chosen


def start(
    names: Sequence[str], model: Path, shape: Shape, cores: list[int], envs: Path, stack: ExitStack
) -> tuple[dict[str, Entry], dict[str, Process], dict[str, str]]:
    """What can run, loaded and warm, and what cannot, with the reason."""
    entries: dict[str, Entry] = {}
    processes: dict[str, Process] = {}
    unavailable: dict[str, str] = {}
    for name in names:
        say(f"starting {name}")
        try:
            entry = make_entry(name, model, shape, cores, envs)
            processes[name] = stack.enter_context(Process(entry.command, entry.variables))
        except Unavailable as error:
            unavailable[name] = str(error)
            continue
        entries[name] = entry
    return entries, processes, unavailable


def warm_up(processes: Mapping[str, Process]) -> None:
    """Kernels compile, memory is touched."""
    for name, process in processes.items():
        say(f"warming up {name}")
        for case in make_cases(WARM_UP_TOKENS):
            if case.batch * case.context <= WARM_UP_PROMPTS:
                with suppress(Unavailable):  # it will fail again when it counts
                    process.ask(request(case, 0, 0))


def measure(
    cases: Sequence[Case], processes: Mapping[str, Process], number: int, failed: dict[str, str]
) -> dict[str, dict[str, Figure]]:
    """One round: in each case every peer in turn, in the other direction in every second round."""
    figures: dict[str, dict[str, Figure]] = {name: {} for name in processes}
    for case in cases:
        order = list(processes) if number % 2 else list(processes)[::-1]
        for name in order:
            try:
                answer = processes[name].ask_in_peace(partial(request, case, number))
            except Unavailable as error:
                failed[f"{name}, {case.name}"] = str(error)
                continue
            figures[name][case.name] = figure(case, answer)
            say(f"round {number}: {case.name}: {name} {figures[name][case.name].tok_per_s:.1f} tok/s")
    return figures


def request(case: Case, number: int, attempt: int) -> dict[str, Any]:
    return {"prompts": case.prompts(number, attempt), "new_tokens": case.new_tokens}


def describe_machine(cores: list[int]) -> dict[str, Any]:
    names = [line.partition(":")[2].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line]
    return {"cpu": names[0] if names else platform.machine(), "cores": len(cores), "system": platform.platform()}


def commit() -> str:
    found = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, cwd=ROOT)
    return found.stdout.strip() or "unknown"


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> int:
    options = parse()
    model = model_source.resolve("demo")
    shape, cores = Shape.read(model), sorted(os.sched_getaffinity(0))
    cases = [case for case in make_cases(options.tokens) if case.name in options.cases]
    names = [*map(name_of_ours, options.ours), *options.peers]
    rounds = []
    with ExitStack() as stack:
        entries, processes, unavailable = start(names, model, shape, cores, options.envs, stack)
        machine = stack.enter_context(Process(machine_command(cores), {}))
        warm_up(processes)
        for number in range(1, options.rounds + 1):
            speed = machine.ask_in_peace(lambda attempt: {})
            figures = measure(cases, processes, number, unavailable)
            rounds.append(Round(Machine(speed["bytes_per_s"], speed["flops_per_s"]), figures))
        versions = {name: process.about["version"] for name, process in processes.items()}
    rows = summarise(cases, rounds, shape, {name: entry.reads for name, entry in entries.items()})
    result = {
        "command": " ".join(["python -m benchmarks.peers", *sys.argv[1:]]),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "machine": describe_machine(cores),
        "peers": {name: {"what": entry.what, "version": versions[name]} for name, entry in entries.items()},
        "unavailable": unavailable,
        "cases": [asdict(case) for case in cases],
        "medians": [asdict(row) for row in rows],
        "rounds": [asdict(r) for r in rounds],
    }
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(result, indent=2) + "\n")
    print(table(rows, [name for name in entries if name.startswith("ours-")]))
    print(notes(rounds, unavailable))
    if not rows:
        return 1
    draw(rows, options.json.with_suffix(".png"))
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
