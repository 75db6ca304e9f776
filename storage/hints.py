"""The hint channels: which jobs changed. Publishes may be lost; readers poll once a second anyway (PROTOCOL.md 11).

Tokens have a channel of their own: an engine wants to know of jobs to claim or to drop, and would be woken by its own commits.
"""

import threading
import time
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from storage import keys
from storage.errors import StoreUnavailable
from storage.wire import translate


def subscriber(url: str, *, timeout: float, client_name: str) -> Any:
    """A client that is used for subscriptions alone: nothing retried, nothing hidden."""
    return redis.Redis.from_url(
        url,
        socket_timeout=timeout,
        socket_connect_timeout=timeout,
        retry=Retry(NoBackoff(), 0),
        client_name=client_name,
        driver_info=None,
        protocol=2,
        decode_responses=True,
    )


class HintReader:
    """One subscription per waiting thread, on its own connection, made at its first ``wait``."""

    def __init__(self, url: str, *, timeout: float, client_name: str) -> None:
        self._client = subscriber(url, timeout=timeout, client_name=client_name)
        self._local = threading.local()
        self._closed = False

    def wait(self, timeout: float, *, tokens: bool) -> frozenset[str]:
        """Ids since the last call of this thread; the first message ends the wait, all that are there come along.

        A thread's first call says for good whether it wants ``tokens``.
        """
        changed: set[str] = set()
        until = time.monotonic() + timeout
        try:
            subscription = self._subscription(tokens)
            while True:
                left = 0.0 if changed else max(0.0, until - time.monotonic())
                message = subscription.get_message(timeout=left)
                if message is not None and message["type"] == "message":
                    changed.add(message["data"])
                elif message is None and (changed or time.monotonic() >= until):
                    return frozenset(changed)
        except (redis.RedisError, OSError) as error:
            self._forget()
            raise translate(error) from error
        except (TypeError, ValueError, AttributeError) as error:
            # redis-py selects on the socket that close() took away in another thread.
            if not self._closed:
                raise
            raise StoreUnavailable("the store was closed") from error

    def _subscription(self, tokens: bool) -> Any:
        subscription: Any = getattr(self._local, "subscription", None)
        if subscription is None:
            subscription = self._client.pubsub()
            subscription.subscribe(keys.HINTS, *([keys.TOKEN_HINTS] if tokens else []))
            self._local.subscription = subscription
        return subscription

    def _forget(self) -> None:
        subscription: Any = getattr(self._local, "subscription", None)
        self._local.subscription = None
        if subscription is not None:
            subscription.close()

    def close(self) -> None:
        self._closed = True
        self._client.close()
        self._client.connection_pool.disconnect()
