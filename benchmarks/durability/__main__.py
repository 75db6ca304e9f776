"""``python -m benchmarks.durability``: measures, prints tables with their goals, writes JSON and a plot.

Exit code 0 when everything was measured, whatever the figures say. Whatever was started is ended, at Ctrl-C and SIGTERM too.
"""

import argparse
import json
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import Field, fields, replace
from pathlib import Path
from typing import Any

from benchmarks.durability import amplification, kill, memory, plots, restore, throughput
from benchmarks.durability.figures import Section, table
from benchmarks.durability.setup import Options, machine
from engine import model_source

SECTIONS: dict[str, Callable[[Options], Section]] = {
    "throughput": throughput.measure,
    "amplification": amplification.measure,
    "restore": restore.measure,
    "kill": kill.measure,
    "memory": memory.measure,
}


def main() -> int:
    arguments = _arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="midsentence-bench-", dir=arguments.disk, ignore_cleanup_errors=True) as name:
        options = _options(arguments, Path(name))
        result: dict[str, Any] = {"arguments": _shown(options), "quick": arguments.quick, "machine": machine(), "sections": {}}
        for section in arguments.sections:
            began = time.monotonic()
            measured = SECTIONS[section](options)
            print(table(section, measured), f"\n{time.monotonic() - began:.0f} s", flush=True)
            result["sections"][section] = measured.as_json()
            arguments.json.write_text(json.dumps(result, indent=2) + "\n")
    plots.draw(arguments.json, arguments.json.with_suffix(".png"))
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.durability", description=__doc__)
    parser.add_argument("--sections", type=_sections, default=list(SECTIONS), help=f"default: {','.join(SECTIONS)}")
    parser.add_argument("--quick", action="store_true", help="small counts, one round, a tiny model unless --model says otherwise")
    parser.add_argument("--model", help="default: demo")
    parser.add_argument("--json", type=Path, default=Path("bench-results/durability.json"), help="the plot is put beside it")
    parser.add_argument("--disk", type=Path, default=Path("/var/tmp"), help="folder for pool files and services; no tmpfs")
    for field in _measured_sizes():
        kinds: dict[object, Callable[[str], Any]] = {tuple[int, ...]: _numbers, int: int, str: str}
        flag = "--" + field.name.replace("_", "-")
        parser.add_argument(flag, type=kinds[field.type], help=f"default: {field.default}")
    return parser.parse_args()


def _measured_sizes() -> list[Field[Any]]:
    return [field for field in fields(Options) if field.name not in ("folder", "place")]


def _sections(text: str) -> list[str]:
    names = text.split(",")
    if unknown := set(names) - SECTIONS.keys():
        raise argparse.ArgumentTypeError(f"unknown {', '.join(sorted(unknown))}; there are {', '.join(SECTIONS)}")
    return names


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(","))


def _options(arguments: argparse.Namespace, place: Path) -> Options:
    if arguments.quick and arguments.model is None:
        from tests.tiny_models import make_tiny_model

        folder = make_tiny_model(place / "tiny", max_position_embeddings=4096)
    else:
        folder = model_source.resolve(arguments.model or "demo")
    options = Options(folder, place)
    options = options.quick() if arguments.quick else options
    given = {field.name: getattr(arguments, field.name) for field in _measured_sizes()}
    return replace(options, **{name: value for name, value in given.items() if value is not None})


def _shown(options: Options) -> dict[str, object]:
    return {"model": options.folder.name} | {field.name: getattr(options, field.name) for field in _measured_sizes()}


if __name__ == "__main__":
    sys.exit(main())
