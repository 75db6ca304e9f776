"""The configuration that we hand to operators starts a server, and one that we accept."""

import subprocess
import time
from pathlib import Path

import pytest

from storage.errors import StoreUnavailable
from storage.redis_store import RedisJobStore
from tests.servers import debian_redis_binary, valkey_binary

CONF = Path(__file__).parents[2] / "deploy" / "redis.conf"


@pytest.mark.parametrize("binary", [valkey_binary(), debian_redis_binary()], ids=["valkey", "debian-redis"])
def test_a_server_with_our_configuration_is_accepted(binary, tmp_path):
    if binary is None:
        pytest.skip("redis-server is not installed")
    socket = tmp_path / "r.sock"
    command = [str(binary), str(CONF), "--port", "0", "--unixsocket", str(socket), "--dir", str(tmp_path), "--logfile", "log"]
    server = subprocess.Popen(command)
    store = RedisJobStore(f"unix://{socket}")
    try:
        deadline = time.monotonic() + 20
        while True:
            try:
                assert store.check_settings() == []
                break
            except StoreUnavailable:
                assert time.monotonic() < deadline
                assert server.poll() is None, (tmp_path / "log").read_text()
                time.sleep(0.05)
    finally:
        store.close()
        server.terminate()
        server.wait(10)
