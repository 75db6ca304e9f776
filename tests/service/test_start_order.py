"""In which order an engine that starts asks the store: seen on the wire, by a real engine on a real Valkey."""

import contextlib
import threading

import redis

from chaos.cluster import Cluster
from chaos.place import ClusterOptions
from storage import keys
from storage.scripts import script


def test_the_pool_table_is_read_after_registration(tiny_folder, tmp_path):
    """Found by the simulator: a killed engine's publish, executed late, could land between the read and the registration that ends
    that engine's rights. The next life then took a page for free that an entry named, and wrote to it."""
    with Cluster(tmp_path / "c", ClusterOptions(str(tiny_folder))) as cluster:
        cluster.start_redis()
        with contextlib.closing(_patient(cluster.redis_url)) as client, client.monitor() as monitor:
            seen: list[str] = []
            reader = threading.Thread(target=lambda: seen.extend(_until_claimed(monitor)), daemon=True)
            reader.start()
            cluster.start_engine()
            reader.join(90.0)
    registered = next(at for at, command in enumerate(seen) if script("register").sha in command)
    table = next(at for at, command in enumerate(seen) if command.startswith(f"HGETALL {keys.POOL}"))
    assert registered < table


def _patient(url):
    """Nothing is said while an engine loads its model."""
    return redis.Redis.from_url(url, socket_timeout=90.0)


def _until_claimed(monitor):
    for event in monitor.listen():
        yield event["command"]
        if script("claim").sha in event["command"]:
            return
