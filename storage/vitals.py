"""How engines do just now, told to whoever listens: a channel, kept nowhere, so that a second's look costs the store no write.

A message may be lost, and with nobody there it is. What must not be lost is in the records.
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import redis

from storage import keys
from storage.wire import translate


class VitalsFeed(Protocol):
    """One listener, of one thread. It is counted as such from its first ``wait`` until ``close``."""

    def wait(self, timeout: float) -> list[str]:
        """What was told since the last call; the first text ends the wait. Raises StoreUnavailable; the next call tries anew."""

    def close(self) -> None: ...


class RedisVitals:
    """``make_client``: over connections that nobody else uses."""

    def __init__(self, make_client: Callable[[], Any]) -> None:
        self._client = make_client()
        self._subscription: Any = None

    def wait(self, timeout: float) -> list[str]:
        told: list[str] = []
        until = time.monotonic() + timeout
        try:
            if self._subscription is None:
                self._subscription = self._client.pubsub(ignore_subscribe_messages=True)
                self._subscription.subscribe(keys.VITALS)
            while (left := 0.0 if told else until - time.monotonic()) >= 0.0:
                message = self._subscription.get_message(timeout=left)
                if message is None and told:
                    break
                if message is not None and message["data"]:  # an empty one only counts us
                    told.append(message["data"])
            return told
        except (redis.RedisError, OSError) as error:
            self._forget()
            raise translate(error) from error

    def _forget(self) -> None:
        subscription, self._subscription = self._subscription, None
        if subscription is not None:
            subscription.close()

    def close(self) -> None:
        self._forget()
        self._client.close()
        self._client.connection_pool.disconnect()


class MemoryVitals:
    """The same channel within one process."""

    def __init__(self) -> None:
        self._told = threading.Condition()
        self._feeds: set[_MemoryFeed] = set()

    def publish(self, text: str) -> int:
        with self._told:
            for feed in self._feeds if text else ():
                feed.told.append(text)
            self._told.notify_all()
            return len(self._feeds)

    def feed(self) -> VitalsFeed:
        return _MemoryFeed(self._told, self._feeds)


class _MemoryFeed:
    def __init__(self, condition: threading.Condition, feeds: "set[_MemoryFeed]") -> None:
        self.told: deque[str] = deque()
        self._condition = condition
        self._feeds = feeds

    def wait(self, timeout: float) -> list[str]:
        with self._condition:
            self._feeds.add(self)
            self._condition.wait_for(lambda: self.told, timeout)
            told, self.told = self.told, deque()
            return list(told)

    def close(self) -> None:
        with self._condition:
            self._feeds.discard(self)
