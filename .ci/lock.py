"""``make lock``: write down what of pyproject.toml is installed, with the hashes of all files that the index has of it.

``requirements.lock`` is what the service runs on (and is built with), ``requirements-otel.lock`` what traces take beside it, and
``requirements-dev.lock`` what tests and checks take beside both. Nothing is resolved here, and nothing at an installation: they
name every package, and pip takes no other file.
"""

import subprocess
import sys
import tomllib
from collections.abc import Iterable
from importlib.metadata import distributions
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parent.parent
#: PyTorch's own builds for CPUs are not on PyPI: of each version, the one for Python 3.11 on x86-64.
TORCH_CPU = {"2.13.0": "6746dbcbeb526eb61330b76b41ff1b4eb848951103a892eeb080dfa2b264667b"}

INSTALLED = {canonicalize_name(each.metadata["Name"]): each for each in distributions()}


def needed_by(requirements: Iterable[str]) -> set[str]:
    """Names of what these need, and so on. What is not installed is not needed here: another system's, or left out on purpose."""
    names: set[str] = set()
    seen: set[tuple[str, str]] = set()
    waiting = [(Requirement(text), "") for text in requirements]
    while waiting:
        requirement, extra = waiting.pop()
        name = canonicalize_name(requirement.name)
        if (requirement.marker and not requirement.marker.evaluate({"extra": extra})) or name not in INSTALLED:
            continue
        names.add(name)
        for wanted in ("", *requirement.extras):
            if (name, wanted) not in seen:
                seen.add((name, wanted))
                waiting += [(Requirement(text), wanted) for text in INSTALLED[name].requires or ()]
    return names


def with_hashes(names: Iterable[str]) -> str:
    pins = [f"{name}=={Version(INSTALLED[name].version).public}" for name in sorted(names)]
    command = ["uv", "pip", "compile", "--quiet", "--no-deps", "--generate-hashes", "--no-annotate", "--no-header", "-"]
    python = ["--python", sys.executable]
    text = subprocess.run([*command, *python], input="\n".join(pins), capture_output=True, text=True, check=True).stdout
    for pin in pins:
        name, _, version = pin.partition("==")
        if name == "torch":
            text = text.replace(f"{pin} \\\n", f"{pin} \\\n    --hash=sha256:{TORCH_CPU[version]} \\\n")
    return text


def main() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras = project["project"]["optional-dependencies"]
    runtime = needed_by([*project["project"]["dependencies"], *extras["demo"], *project["build-system"]["requires"]])
    traces = needed_by(extras["otel"]) - runtime
    (ROOT / "requirements.lock").write_text(with_hashes(runtime))
    (ROOT / "requirements-otel.lock").write_text(with_hashes(traces))
    (ROOT / "requirements-dev.lock").write_text(with_hashes(needed_by(extras["dev"]) - runtime - traces - {"pip"}))


if __name__ == "__main__":
    main()
