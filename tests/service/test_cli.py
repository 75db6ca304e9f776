"""The command line from outside: what scripts and people rely on."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time

import pytest


def midsentence(*arguments, timeout=30, stdin="", **variables):
    environment = {key: value for key, value in os.environ.items() if not key.startswith("MIDSENTENCE_")}
    return subprocess.run(
        [sys.executable, "-m", "service.cli", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=timeout,
        input=stdin,
        env={**environment, **variables},
    )


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_help_lists_the_commands_quickly():
    began = time.monotonic()
    ran = midsentence("--help")
    assert time.monotonic() - began < 15.0  # half a second on a quiet machine; the next test holds what makes it so
    assert ran.returncode == 0
    for command in ("serve", "api", "engine", "recover", "verify", "jobs", "submit", "doctor", "demo", "config"):
        assert command in ran.stdout


def test_help_imports_nothing_heavy():
    heavy = ("torch", "numpy", "redis", "httpx", "fastapi", "uvicorn")
    code = f"import sys, service.cli; print([m for m in {heavy} if m in sys.modules])"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout == "[]\n"


def test_version():
    assert midsentence("--version").stdout.startswith("midsentence ")


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["serve", "--page-siz", "3"], 2, "--page-siz"),
        (["serve", "--page-size", "zero"], 78, "--page-size: input should be a valid integer"),
        (["serve", "--prefill-chunk", "100"], 78, "prefill_chunk (100) must be a multiple of page_size (16)"),
        (["serve", "--host", "0.0.0.0"], 78, "nobody would be asked for a key: set api_keys_file"),
        (["keys", "add", "a:b", "--api-keys-file", "/nowhere/keys"], 78, "'a:b' cannot name a tenant"),
        (["keys", "add", "a", "--api-keys-file", "/nowhere/keys"], 78, "cannot add a key to /nowhere/keys"),
        (["engine", "--redis-url", "http://x"], 78, "--redis-url: must begin with redis://"),
        (["config", "show", "--config", "/nowhere.toml"], 78, "cannot read the configuration file /nowhere.toml"),
        (["verify", "--data-dir", "/nowhere"], 78, "there is no data directory /nowhere (name it with --data-dir)"),
        (["recover", "--verify"], 2, "--verify"),
        (["jobs", "show"], 2, "JOB"),
        (["submit", "hi", "--file", "x"], 78, "given twice"),
        (["submit", "--file", "/nowhere.txt"], 78, "/nowhere.txt"),
    ],
)
def test_a_wrong_flag_or_value_is_named(arguments, code, says):
    ran = midsentence(*arguments)
    assert ran.returncode == code
    assert says in " ".join(ran.stderr.split())
    assert "Traceback" not in ran.stderr


def test_an_unknown_variable_is_refused_by_name():
    ran = midsentence("config", "show", MIDSENTENCE_PROT="1")
    assert ran.returncode == 78
    assert "unknown variable MIDSENTENCE_PROT (did you mean MIDSENTENCE_PORT?)" in ran.stderr


def test_config_show_says_where_each_value_comes_from(tmp_path):
    (tmp_path / "midsentence.toml").write_text("page_size = 8\n")
    ran = midsentence(
        "config", "show", "--json", "--data-dir", tmp_path, "--redis-url", "redis://u:secret@h/0", MIDSENTENCE_PORT="99"
    )
    shown = json.loads(ran.stdout)
    assert shown["page_size"] == {"value": 8, "source": f"page_size in {tmp_path}/midsentence.toml"}
    assert shown["port"] == {"value": 99, "source": "MIDSENTENCE_PORT"}
    assert shown["redis_url"] == {"value": "redis://***@h/0", "source": "--redis-url"}
    assert shown["queue_limit"] == {"value": 10000, "source": "default"}
    table = midsentence("config", "show", "--data-dir", tmp_path).stdout
    assert "max_step_tokens" in table
    assert "secret" not in table


@pytest.mark.parametrize("command", ["engine", "api"])
def test_alone_and_without_redis_is_refused_with_the_ways_out(tmp_path, command):
    ran = midsentence(command, "--data-dir", tmp_path / "data")
    assert ran.returncode == 78
    assert "no embedded Redis runs in" in ran.stderr
    assert "give --redis-url, or run `midsentence serve`" in ran.stderr
    assert not (tmp_path / "data" / "run" / f"{command}.pid").exists()


def test_a_client_command_without_a_server_says_so():
    ran = midsentence("jobs", "list", "--url", "http://127.0.0.1:9")
    assert ran.returncode == 1
    assert "http://127.0.0.1:9 does not answer" in ran.stderr
    assert "Traceback" not in ran.stderr


def test_serve_refuses_a_directory_it_cannot_use(tmp_path):
    (tmp_path / "file").write_text("")
    ran = midsentence("serve", "--data-dir", tmp_path / "file" / "data")
    assert ran.returncode == 78
    assert "choose another --data-dir" in ran.stderr


def test_an_engine_that_cannot_keep_its_kernels_is_refused_with_the_variable_to_set(tmp_path):
    """On a read-only root numba raised, and the supervisor started the engine again for ever."""
    nowhere = {"XDG_CACHE_HOME": "/proc/none", "NUMBA_CACHE_DIR": ""}
    ran = midsentence("engine", "--data-dir", tmp_path, "--redis-url", "unix:///none", timeout=120, **nowhere)
    assert ran.returncode == 78
    assert "compiled kernels cannot be kept in /proc/none/midsentence/kernels/" in ran.stderr
    assert "set XDG_CACHE_HOME" in ran.stderr


def test_doctor_finds_what_would_fail(tmp_path):
    ran = midsentence(
        "doctor", "--data-dir", tmp_path, "--model", tmp_path / "none", "--redis-url", "redis://127.0.0.1:9", timeout=120
    )
    assert ran.returncode == 1
    failed = [line.split()[0] for line in ran.stdout.splitlines() if " fail " in line]
    assert failed == ["model", "Redis"]


def serve_until_refused(folder, *arguments):
    """The real command line under the real supervisor: exit 78 is final, and its reason is the last line."""
    ran = midsentence("serve", "--data-dir", folder, "--engine-port", "0", "--port", free_port(), *arguments, timeout=120)
    assert ran.returncode == 78
    assert not list((folder / "run").glob("*.pid"))
    return ran.stderr.splitlines()[-1]


def test_a_refusal_reaches_the_supervisor_as_its_last_word(tmp_path):
    assert "cannot run: no model at" in serve_until_refused(tmp_path / "data", "--model", tmp_path / "none")


def test_more_device_pages_than_memory_are_refused_and_not_tried_for_ever(tiny_folder, tmp_path):
    said = serve_until_refused(tmp_path / "data", "--model", tiny_folder, "--device-pages", 10**12)
    assert re.search(
        r"10{12} device pages of \d+ KiB are \d+ MiB; there are \d+ \(give fewer --device-pages, or leave it out\)", said
    )


def test_interrupting_config_show_and_friends_is_quiet(tmp_path):
    """A reader that leaves early (`| head`) is no error."""
    process = subprocess.Popen(
        [sys.executable, "-m", "service.cli", "config", "show", "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    errors = process.stderr.read()
    process.stderr.close()
    assert process.wait(20) in (0, 1, 120, -signal.SIGPIPE)
    assert b"Traceback" not in errors
