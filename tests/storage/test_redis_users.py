"""The users of deploy/redis-users.acl: ours may do what we do (the contract suites run as it, too), and nothing else."""

import re
from pathlib import Path

import pytest
import redis

from chaos.processes import wait_until
from storage.errors import StoreMisconfigured
from storage.redis_store import RedisJobStore
from tests.storage.users import NOBODY_KNOWS, OPERATOR, OURS, SHIPPED, url_of

LUA = Path(__file__).parents[2] / "storage" / "lua"


@pytest.fixture
def ours(valkey_with_users):
    with redis.Redis.from_url(url_of(valkey_with_users, OURS)) as client:
        yield client


def test_it_is_accepted_as_a_store_without_a_warning_about_what_cannot_be_seen(valkey_with_users):
    store = RedisJobStore(url_of(valkey_with_users, OURS))
    try:
        assert [warning for warning in store.check_settings() if "cannot read" in warning] == []
    finally:
        store.close()


@pytest.mark.parametrize(
    "command",
    [
        "FLUSHALL", "FLUSHDB", "CONFIG SET dir /tmp", "CONFIG REWRITE", "SHUTDOWN", "REPLICAOF 127.0.0.1 1",
        "MODULE LIST", "ACL LIST", "ACL SETUSER midsentence +@all", "KEYS *", "MONITOR", "CLIENT LIST", "CLIENT KILL ID 1",
        "SAVE", "BGSAVE", "SCRIPT FLUSH", "SLOWLOG GET", "RENAME midsentence:a midsentence:b", "FUNCTION LIST",
        "MIGRATE 127.0.0.1 1 x 0 1", "SORT midsentence:x", "GET other:key", "SET other:key x", "DEL other:key", "PUBLISH other x",
        "SUBSCRIBE other", "HGETALL midsentenceX", "EXPIRE midsentence:x 1",
    ],
)  # fmt: skip
def test_it_may_do_nothing_that_we_do_not(ours, command):
    with pytest.raises(redis.exceptions.NoPermissionError):
        ours.execute_command(*command.split())


def test_it_may_have_the_file_written_anew(valkey_with_users, ours):
    """The one command of ours that is about the server and not about keys: purged jobs stay in its file without it."""
    with redis.Redis.from_url(url_of(valkey_with_users, OPERATOR)) as operator:
        before = operator.info("persistence")["aof_rewrites"]
        ours.bgrewriteaof()
        assert operator.info("persistence")["aof_rewrites"] == before + 1  # counted when it begins
        wait_until(lambda: not operator.info("persistence")["aof_rewrite_in_progress"], 30, "its end, which other tests rely on")


def test_a_script_reaches_no_further_than_its_user(ours):
    with pytest.raises(redis.ResponseError, match="ACL failure in script"):
        ours.eval("return redis.call('GET', 'other:key')", 0)
    with pytest.raises(redis.ResponseError, match="ACL failure in script"):
        ours.eval("return redis.call('FLUSHALL')", 0)


def test_nobody_comes_in_without_a_password(valkey_with_users):
    for url in (valkey_with_users.url, url_of(valkey_with_users, OURS).replace("secret", "wrong")):
        store = RedisJobStore(url)
        try:
            with pytest.raises(StoreMisconfigured, match="refused our credentials"):
                store.identity()
        finally:
            store.close()


def test_the_operator_can_do_what_we_cannot(valkey_with_users):
    with redis.Redis.from_url(url_of(valkey_with_users, OPERATOR)) as client:
        assert client.acl_whoami() in (OPERATOR, OPERATOR.encode())


def test_it_is_handed_out_with_passwords_that_nobody_knows():
    lines = SHIPPED.read_text().splitlines()
    assert lines[0] == "user default off"
    assert all(NOBODY_KNOWS in line and "nopass" not in line and ">" not in line for line in lines[1:])


def test_every_command_of_the_scripts_is_allowed_by_name():
    (line,) = (line for line in SHIPPED.read_text().splitlines() if line.startswith(f"user {OURS} "))
    allowed = set(re.findall(r"\+(\S+)", line))
    assert not {name for name in allowed if name.startswith("@")}
    called = {name.lower() for path in LUA.glob("*.lua") for name in re.findall(r"redis\.call\('(\w+)'", path.read_text())}
    assert len(called) > 15
    assert called <= allowed
