"""The Redis of a data directory for a command that looks: the one that runs, or one started for as long as it takes."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from service.redis_server import EmbeddedRedis
from service.settings import Settings


@dataclass(frozen=True, slots=True)
class BorrowedRedis:
    url: str
    started: bool  #: by us, under its lock: nobody used it before


@contextmanager
def borrowed_redis(settings: Settings) -> Iterator[BorrowedRedis]:
    """One that was started is stopped again, unless a service came and uses it: that starts its own when this one ends."""
    if settings.redis_url is not None:
        yield BorrowedRedis(settings.redis_url, started=False)
        return
    server = EmbeddedRedis(settings.data_dir)
    url = server.start_or_attach()
    try:
        yield BorrowedRedis(url, server.started_here)
    finally:
        if server.started_here:
            server.stop()
