"""What ``midsentence doctor`` says of a Redis and of a directory, each made that way."""

import subprocess
import sys

import pytest
import redis

from service.doctor import Status, _redis, locks_work
from service.settings import Settings
from tests.servers import running_redis, valkey_binary


@pytest.fixture
def server(tmp_path):
    with running_redis(valkey_binary(), tmp_path / "redis", ("--maxmemory", "512mb")) as made:
        yield made


def findings(server):
    return [(f.what, f.status) for f in _redis(Settings(redis_url=server.url))]


def test_a_redis_as_it_should_be(server):
    assert findings(server) == [("Redis", Status.OK)]


@pytest.mark.parametrize(
    ("setting", "value", "expected"),
    [
        ("save", "60 1", ("Redis settings", Status.WARN)),
        ("maxmemory", "0", ("Redis settings", Status.WARN)),
        ("appendfsync", "everysec", ("Redis", Status.FAIL)),
        ("maxmemory-policy", "allkeys-lru", ("Redis", Status.FAIL)),
        ("no-appendfsync-on-rewrite", "yes", ("Redis", Status.FAIL)),
    ],
)
def test_a_setting_that_loses_or_stops_something(server, setting, value, expected):
    with redis.Redis.from_url(server.url) as client:
        client.config_set(setting, value)
    assert expected in findings(server)


def test_a_redis_that_is_nearly_full(server):
    with redis.Redis.from_url(server.url) as client:
        client.config_set("maxmemory", client.info("memory")["used_memory"] + 65536)
    assert ("Redis memory", Status.WARN) in findings(server)


def test_a_replica(server, tmp_path):
    with redis.Redis.from_url(server.url) as client:
        client.replicaof("127.0.0.1", 1)
    assert ("Redis", Status.FAIL) in findings(server)


def test_locks_work_on_a_local_disk_and_the_probe_leaves_nothing(tmp_path):
    assert locks_work(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_told_before_redis_meets_it(tmp_path):
    """A file system of 4 MB of its own, in a mount namespace that goes with the process."""
    script = f"mount -t tmpfs -o size=4m none {tmp_path} && exec {{python}} -c '{{code}}'"
    code = (
        "from service.doctor import _directory; from service.settings import Settings; "
        f'print([f.what for f in _directory(Settings(data_dir="{tmp_path}/data")) if f.status == "fail"])'
    )
    ran = subprocess.run(
        ["unshare", "-rm", "sh", "-c", script.format(python=sys.executable, code=code)], capture_output=True, text=True
    )
    if ran.returncode and "unshare" in ran.stderr:
        pytest.skip("no mount namespaces here")
    assert ran.stdout == "['free disk']\n", ran.stderr
