"""What is installed is what was locked; what was not audited is not called clean."""

import importlib.util
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent
LOCKS = {name: (ROOT / name).read_text() for name in ("requirements.lock", "requirements-otel.lock", "requirements-dev.lock")}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def pins(lock):
    return dict(re.findall(r"^([\w.-]+)==(\S+)", LOCKS[lock], re.MULTILINE))


def audit():
    spec = importlib.util.spec_from_file_location("audit", ROOT / ".ci" / "audit.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("lock", LOCKS)
def test_every_package_has_one_version_and_hashes(lock):
    blocks = re.split(r"\n(?=\S)", LOCKS[lock].strip())
    assert len(blocks) > 5
    for block in blocks:
        assert re.fullmatch(r"[\w.-]+==\S+( \\\n    --hash=sha256:[0-9a-f]{64})+", block), block[:200]


@pytest.mark.parametrize(
    ("group", "locks"),
    [
        (PROJECT["project"]["dependencies"], ["requirements.lock"]),
        (PROJECT["build-system"]["requires"], ["requirements.lock"]),
        (PROJECT["project"]["optional-dependencies"]["demo"], ["requirements.lock"]),
        (PROJECT["project"]["optional-dependencies"]["otel"], ["requirements.lock", "requirements-otel.lock"]),
        (PROJECT["project"]["optional-dependencies"]["dev"], list(LOCKS)),
    ],
    ids=["run", "build", "demo", "otel", "dev"],
)
def test_what_the_project_asks_for_is_locked(group, locks):
    locked = {name: version for lock in locks for name, version in pins(lock).items()}
    for text in group:
        wanted = Requirement(text)
        assert wanted.specifier.contains(locked[canonicalize_name(wanted.name)]), text


def test_the_service_does_not_carry_the_tools_of_its_tests():
    assert len({name for lock in LOCKS for name in pins(lock)}) == sum(len(pins(lock)) for lock in LOCKS)  # each in one
    assert not {"pytest", "mypy", "ruff", "pip-audit", "openai", "opentelemetry-sdk"} & pins("requirements.lock").keys()


@pytest.mark.parametrize(("place", "locks"), [("Makefile", 3), ("Dockerfile", 2)])
def test_every_lock_is_installed_by_its_hashes(place, locks):
    lines = [line for line in (ROOT / place).read_text().splitlines() if "pip install" in line and "-r requirements" in line]
    assert sum(line.count("-r requirements") for line in lines) == locks
    assert all("--require-hashes" in line and "--no-deps" in line for line in lines)


def test_a_file_with_another_hash_is_not_installed(tmp_path):
    """Of pip itself: what all of this stands on."""
    wheel = tmp_path / "locked-1.0-py3-none-any.whl"
    wheel.write_bytes(b"not what was locked")
    (tmp_path / "lock").write_text("locked==1.0 --hash=sha256:" + "0" * 64 + "\n")
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--no-index",
        "--find-links",
        str(tmp_path),
        "--target",
        str(tmp_path / "to"),
    ]
    done = subprocess.run([*command, "--no-deps", "--require-hashes", "-r", "lock"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1
    assert "DO NOT MATCH THE HASHES" in done.stderr


@pytest.mark.parametrize("place", ["Makefile", "Dockerfile"])
def test_torch_comes_first_since_only_the_machine_knows_which_build(place):
    """By its hashes pip would always take the build for CUDA, which is on PyPI, and nothing of what that one needs."""
    text = (ROOT / place).read_text()
    assert 0 < text.index("grep -o '^torch==[0-9.]*' requirements.lock") < text.index("--require-hashes -r requirements.lock")


GOOD = {"name": "good", "version": "1", "vulns": []}
BAD = {"name": "bad", "version": "2", "vulns": [{"id": "PYSEC-1", "fix_versions": ["2.1"]}]}
UNKNOWN = {"name": "unknown", "skip_reason": "Dependency not found on PyPI"}


@pytest.mark.parametrize(
    ("packages", "code", "accepted", "said"),
    [
        ([GOOD, GOOD], 0, 0, "audited 2 packages"),
        ([GOOD, BAD], 1, 1, "bad 2: PYSEC-1, fixed in 2.1"),
        ([BAD, UNKNOWN], 1, 1, "PYSEC-1"),  # what is known counts, whatever else is not
        ([GOOD, UNKNOWN], 1, 0, "NOT AUDITED: the vulnerability service knew 1 of 2 packages"),
        ([UNKNOWN], 1, 0, "NOT AUDITED: the vulnerability service knew 0 of 1 packages"),
        ([], 1, 0, "NOT AUDITED"),
    ],
)
def test_an_audit_that_could_not_look_is_no_success(packages, code, accepted, said):
    verdict = audit().verdict
    for accept, expected in ((False, code), (True, accepted)):
        found, lines = verdict(packages, accept_unreachable=accept)
        assert found == expected
        assert said in "\n".join(lines)
