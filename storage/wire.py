"""One exchange with Redis: a pipeline out, its replies in, nothing retried, every failure one of ``storage.errors``.

redis-py repeats commands up to ten times by itself (one INCR whose reply was lost three times gave 4), and reconnects without
telling. So it only provides connections here; sending, reading and the check at each new connection are ours.
"""

from collections.abc import Callable, Sequence
from typing import Any

import hiredis
import redis
from redis.backoff import NoBackoff
from redis.connection import BlockingConnectionPool, ConnectionPool
from redis.retry import Retry

from storage.errors import StorageError, StoreFull, StoreMisconfigured, StoreUnavailable
from storage.failpoints import hit

Command = tuple[str | bytes, ...]
#: Error replies that say "not now"; the rest of what Redis says is a mistake of ours or of its configuration.
_NOT_NOW = ("LOADING", "READONLY", "BUSY", "MASTERDOWN", "CLUSTERDOWN", "TRYAGAIN", "NOREPLICAS")
_WAIT_FOR_CONNECTION = 30.0


class Wire:
    """Thread-safe. With ``connections=1`` answers come in the order in which calls were made."""

    def __init__(
        self,
        url: str,
        *,
        connections: int,
        timeout: float,
        client_name: str,
        greet: Callable[["Greeting"], None] | None = None,
    ) -> None:
        self._greet = greet
        try:
            self._pool: ConnectionPool = BlockingConnectionPool.from_url(
                url,
                max_connections=connections,
                timeout=max(timeout, _WAIT_FOR_CONNECTION),
                socket_timeout=timeout,
                socket_connect_timeout=timeout,
                retry=Retry(NoBackoff(), 0),
                client_name=client_name or None,
                driver_info=None,
                protocol=2,
                decode_responses=True,
                encoding_errors="replace",  # a flipped bit is the checks' to find, not an exception in the middle of a reply
                redis_connect_func=self._on_connect,
            )
        except ValueError as error:
            raise StoreMisconfigured(f"Redis URL is not usable: {error}", "redis://, rediss:// or unix:///path") from error

    def _on_connect(self, connection: Any) -> None:
        connection.on_connect()
        if self._greet is None:
            return
        try:
            self._greet(Greeting(connection))
        except BaseException:
            connection.disconnect()  # else the pool would keep a connection that was refused
            raise

    def exchange(self, commands: Sequence[Command], *, after_send: str = "", decode: bool = True) -> list[Any]:
        """Replies in order; an error reply stands in the list as the exception that it is. ``after_send`` names a failpoint.

        ``decode=False``: texts come as bytes.
        """
        try:
            connection: Any = self._pool.get_connection()
        except (redis.RedisError, OSError) as error:
            raise translate(error) from error
        try:
            return _exchange(connection, commands, after_send, decode)
        except (redis.RedisError, OSError) as error:
            connection.disconnect()
            raise translate(error) from error
        except BaseException:
            connection.disconnect()  # replies are still to come: they must not reach the next caller
            raise
        finally:
            self._pool.release(connection)

    def call(self, *command: str) -> Any:
        reply = self.exchange([command])[0]
        if isinstance(reply, Exception):
            raise translate(reply) from reply
        return reply

    def close(self) -> None:
        self._pool.disconnect()


class Greeting:
    """A connection that was just made, before anybody else uses it."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection

    def call(self, *command: str) -> Any:
        self._connection.send_command(*command, check_health=False)
        return self._connection.read_response()


def _exchange(connection: Any, commands: Sequence[Command], after_send: str, decode: bool) -> list[Any]:
    # redis-py's own way takes three times as long. hiredis' stub says a tuple of one.
    packed = b"".join(hiredis.pack_command(command) for command in commands)  # type: ignore[arg-type]
    connection.send_packed_command([packed], check_health=False)
    if after_send:
        hit(after_send)
    replies: list[Any] = []
    for _ in commands:
        try:
            replies.append(connection.read_response(disable_decoding=not decode))
        except redis.ResponseError as error:
            replies.append(error)
    return replies


def translate(error: BaseException) -> StorageError:
    """The one table from what redis-py raises to what we promise."""
    text = str(error)
    refused = isinstance(error, redis.AuthenticationError | redis.exceptions.AuthorizationError)
    if refused or text.startswith(("NOAUTH", "WRONGPASS")):
        return StoreMisconfigured(f"Redis refused our credentials: {text}", "check user and password of the Redis URL")
    if isinstance(error, redis.exceptions.NoPermissionError):
        return StoreMisconfigured(f"Redis refused a command: {text}", "give the user what deploy/redis-users.acl gives it")
    if isinstance(error, redis.exceptions.OutOfMemoryError) or text.startswith("OOM"):
        return StoreFull(f"Redis is out of memory: {text}", "raise maxmemory or let finished jobs expire; jobs wait meanwhile")
    if "MISCONF" in text:
        return StoreUnavailable(f"Redis cannot write to disk: {text}", "free its disk; its log names the error")
    if isinstance(error, redis.ConnectionError | redis.TimeoutError | redis.ReadOnlyError | OSError):
        return StoreUnavailable(f"Redis did not answer: {text}")
    if text.startswith(_NOT_NOW):
        return StoreUnavailable(f"Redis is not ready: {text}")
    return StorageError(f"Redis answered with an error: {text}")
