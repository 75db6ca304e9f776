"""Nothing that is loaded can run code: safetensors, GGUF and JSON only. Held by the syntax trees of everything we ship."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("engine", "storage", "recovery", "service", "chaos")
SHIPPED = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))

#: Modules whose readers run what they read.
MODULES = {"pickle", "_pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "yaml", "jsonpickle", "runpy"}
#: Calls that run what they are given.
CALLS = {"torch.load", "eval", "exec", "compile", "__import__"}
#: Switches that may only be off.
SWITCHES = ("trust_remote_code", "allow_pickle", "shell")
#: Calls that must say so, by the last of their names: their default asks, or has changed before.
MUST_SAY = {"from_pretrained": "trust_remote_code", "np.load": "allow_pickle"}


def offences(tree):
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from (f"import {name.name}" for name in names if name.name.split(".")[0] in MODULES)
            case ast.ImportFrom(module=str(module)):
                if module.split(".")[0] in MODULES:
                    yield f"from {module}"
            case ast.Call(func=function, keywords=keywords):
                name, said = ast.unparse(function), {keyword.arg: ast.unparse(keyword.value) for keyword in keywords}
                if name in CALLS:
                    yield name
                yield from (f"{switch}={said[switch]}" for switch in SWITCHES if said.get(switch, "False") != "False")
                yield from (
                    f"{name} without {word}=False" for end, word in MUST_SAY.items() if name.endswith(end) and word not in said
                )


def test_nothing_we_ship_reads_what_could_run():
    assert len(SHIPPED) > 150
    found = {path.relative_to(ROOT): list(offences(ast.parse(path.read_text()))) for path in SHIPPED}
    assert {path: what for path, what in found.items() if what} == {}


@pytest.mark.parametrize(
    "planted",
    [
        "import pickle",
        "from pickle import loads",
        "import numpy, joblib.numpy_pickle",
        "torch.load(path)",
        "np.load(path)",
        "eval(text)",
        "AutoModel.from_pretrained(path)",
        "AutoModel.from_pretrained(path, trust_remote_code=settings.trust)",
        "AutoConfig.from_pretrained(path, trust_remote_code=True)",
        "subprocess.run(command, shell=True)",
    ],
)
def test_the_search_finds_what_it_looks_for(planted):
    assert list(offences(ast.parse(planted)))
