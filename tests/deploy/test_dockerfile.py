"""The image by its recipe: there is no Docker engine here. What runs in it is tried: the health check against real ports."""

import http.server
import json
import re
import subprocess
import sys
import threading
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "Dockerfile").read_text()
#: (instruction, its arguments), with continued lines joined and comments gone.
STEPS = [
    tuple(line.split(maxsplit=1))
    for line in re.sub(r"\\\n\s*", "", re.sub(r"^#.*\n", "", TEXT, flags=re.MULTILINE)).splitlines()
    if line
]
LAST = STEPS[max(index for index, (name, _) in enumerate(STEPS) if name == "FROM") :]


def arguments(name, steps=LAST):
    return [value for step, value in steps if step == name]


def test_every_instruction_is_one():
    known = {"FROM", "ENV", "RUN", "WORKDIR", "ARG", "COPY", "LABEL", "USER", "VOLUME", "EXPOSE", "STOPSIGNAL", "HEALTHCHECK"}
    assert {name for name, _ in STEPS} <= known | {"ENTRYPOINT", "CMD"}  # and no ADD, which would fetch and unpack


def test_it_runs_as_nobody_special_from_a_small_image():
    assert arguments("USER") == ["midsentence"]
    after = LAST[LAST.index(("USER", "midsentence")) :]
    assert not arguments("RUN", after)
    assert not arguments("COPY", after)
    assert not any("pip" in run or "apt" in run for run in arguments("RUN"))  # built elsewhere, copied
    assert arguments("COPY") == ["--from=build /opt/midsentence /opt/midsentence"]


def test_no_secret_is_baked_in():
    for name in ("ENV", "ARG", "LABEL"):
        for value in arguments(name, STEPS):
            assert not re.search(r"key|token|password|secret", value, re.IGNORECASE), value


def test_everything_copied_is_there_and_nothing_else_reaches_the_builder():
    """``.dockerignore`` leaves all out and names what may come: no key, no data directory, no history can be copied by mistake."""
    everything, *allowed = (ROOT / ".dockerignore").read_text().split()
    assert everything == "*"
    copied = [source for value in arguments("COPY", STEPS[: STEPS.index(LAST[0])]) for source in value.split()[:-1]]
    for source in copied:
        assert (ROOT / source).exists(), source
    assert {f"!{Path(source).name}" for source in copied} | {"**/__pycache__"} == set(allowed)


def test_labels_and_versions_are_those_of_the_project():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (label,) = arguments("LABEL")
    for name in ("title", "description", "licenses", "version", "revision"):
        assert f"org.opencontainers.image.{name}=" in label
    assert f"VERSION={project['version']}" in arguments("ARG")
    assert f'licenses="{project["license"]}"' in label


@pytest.mark.parametrize(("path", "code"), [("/livez", 0), ("/elsewhere", 1)])
def test_the_health_check_asks_the_ports_that_answer(path, code):
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200 if self.path == path else 404)
            self.end_headers()

        def log_message(self, *_):
            pass

    (check,) = arguments("HEALTHCHECK")
    program = json.loads(check[check.index("[") :])
    assert program[:2] == ["python", "-c"]
    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        ours = program[2].replace("(8710, 8711)", f"(1, {server.server_port})")
        assert ours != program[2]
        assert subprocess.run([sys.executable, "-c", ours], timeout=30).returncode == code
        server.shutdown()
