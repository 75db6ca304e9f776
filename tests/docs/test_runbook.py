"""Whatever the product prints, raises or answers has its entry in the runbook, which has none for what is no more."""

import ast
import inspect
import re
from pathlib import Path

import yaml

import engine.errors
import service.errors
import storage.errors
from service.api import problems
from service.processes import Exit

ROOT = Path(__file__).parents[2]
HEADINGS = set(re.findall(r"^### (.+)$", (ROOT / "docs" / "runbook.md").read_text(), re.MULTILINE))


def raised(module):
    """Classes of errors that are raised themselves: no one's base, or called somewhere."""
    own = {kind for _, kind in inspect.getmembers(module, inspect.isclass) if kind.__module__ == module.__name__}
    kinds = {kind for kind in own if issubclass(kind, Exception) and kind is not service.errors.Stopped}
    bases = {base for kind in kinds for base in kind.__bases__}
    return {kind.__name__ for kind in kinds if kind not in bases or kind is engine.errors.InvalidRequest}


def literals(folder, name):
    """Values of keyword arguments ``name="..."`` and of class attributes ``name = "..."`` in a package."""
    for path in (ROOT / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            value = node.value if isinstance(node, ast.keyword) and node.arg == name else None
            if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == name:
                value = node.value
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield value.value


def job_codes():
    """First arguments of ``JobError("...")``, and what ``recover`` ends jobs with."""
    for folder in ("recovery", "service", "storage"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "JobError":
                    first = node.args[0] if node.args else None
                    if isinstance(first, ast.Constant):
                        yield first.value
    yield from literals("recovery", "code")
    yield from literals("engine", "code")
    yield "failed_by_operator"


def wanted():
    alerts = yaml.safe_load((ROOT / "deploy" / "prometheus" / "rules.yml").read_text())["groups"]
    return {
        "exits": {f"Exit {code}" for code in Exit},
        "alerts": {rule["alert"] for group in alerts for rule in group["rules"] if "alert" in rule},
        "errors": raised(service.errors) | raised(storage.errors) | raised(engine.errors),
        "problems": {problem.code for problem in problems.TABLE.values()} | set(literals("service/api", "code")),
        "jobs": set(job_codes()),
    }


def test_nothing_is_missing():
    for kind, names in wanted().items():
        assert len(names) >= 5, kind
        assert names <= HEADINGS, f"{kind} without an entry: {sorted(names - HEADINGS)}"


def test_nothing_is_left_over():
    assert set().union(*wanted().values()) >= HEADINGS
