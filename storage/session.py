"""Scripts sent in the name of one store: id and epoch go with every call, and every new connection proves the commit mark."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import redis

from storage import keys
from storage.errors import EngineDead, StorageError, WrongStore
from storage.records import StoreIdentity
from storage.scripts import all_scripts, script
from storage.store_file import describe_wrong_store
from storage.wire import Command, Greeting, Wire, translate

#: What lies under our keys, and what it means. A version that would misread the last one's raises it, and the epoch with it.
FORMAT = "1"
_READ_IDENTITY = ("HMGET", keys.STORE, "id", "epoch", "commit", "format")


@dataclass(frozen=True, slots=True)
class Call:
    verb: str
    args: tuple[str | bytes, ...]


class Session:
    """``plain`` is a second connection without the check: identity and settings must be readable of a wrong store too."""

    def __init__(self, url: str, *, connections: int, timeout: float, client_name: str) -> None:
        self._wire = Wire(url, connections=connections, timeout=timeout, client_name=client_name, greet=self._greet)
        self.plain = Wire(url, connections=1, timeout=timeout, client_name=f"{client_name}-plain")
        self._lock = threading.Lock()
        self._bound: StoreIdentity | None = None
        self._mark = 0

    # identity --------------------------------------------------------------------------------------------------------
    def identity(self) -> StoreIdentity | None:
        return _identity(self.plain.call(*_READ_IDENTITY))

    def create(self, store_id: str) -> StoreIdentity:
        created = _identity(self._eval_plain("create", store_id, FORMAT))
        assert created is not None
        return created

    def bind(self, identity: StoreIdentity) -> None:
        with self._lock:
            self._bound, self._mark = identity, identity.commit
        self._wire.close()  # what is open was proved for another identity; the next call connects anew

    def raise_epoch(self) -> StoreIdentity:
        seen = self.identity()
        if seen is None:
            raise WrongStore("there is no store in this Redis", "check the Redis URL")
        answer = self._eval_plain("raise_epoch", seen.store_id, str(seen.epoch))
        if answer[0] == "WRONG_STORE":
            raise WrongStore("another process changed the store's epoch just now", "look again, then decide")
        return StoreIdentity(seen.store_id, int(answer[2]), int(answer[1]))

    @property
    def mark(self) -> int:
        """The highest commit counter that any answer carried."""
        with self._lock:
            return self._mark

    # calls -----------------------------------------------------------------------------------------------------------
    def run(self, verb: str, *args: str | bytes) -> Any:
        return self.run_all([Call(verb, args)])[0]

    def run_alive(self, verb: str, engine_id: str, incarnation: str, *args: str) -> Any:
        answer = self.run(verb, engine_id, incarnation, *args)
        if answer[0] == "DEAD":
            raise EngineDead(f"engine {engine_id} was declared dead as incarnation {incarnation}")
        return answer

    def run_all(self, calls: Sequence[Call], *, after_send: str = "") -> list[Any]:
        """One pipeline of scripts. EVALSHA, for a pipeline of EVALs took three fsyncs where this takes one."""
        if not calls:
            return []
        bound, mark = self._require_bound()
        commands = [_evalsha(call.verb, bound.store_id, str(bound.epoch), *call.args) for call in calls]
        replies = self._wire.exchange(commands, after_send=after_send)
        missing = [i for i, reply in enumerate(replies) if isinstance(reply, redis.exceptions.NoScriptError)]
        if missing:  # nothing was done by these: Redis was restarted, or SCRIPT FLUSH
            loads = [("SCRIPT", "LOAD", each.text) for each in all_scripts()]
            resent = self._wire.exchange([*loads, *(commands[i] for i in missing)])[len(loads) :]
            for i, reply in zip(missing, resent, strict=True):
                replies[i] = reply
        return self._accept(replies, mark)

    def exchange(self, commands: Sequence[Command], *, decode: bool = True) -> list[Any]:
        """Plain reads, behind a read of the identity: after a FLUSHALL nobody may be told that his job never was."""
        if not commands:
            return []
        _, mark = self._require_bound()
        replies = self._wire.exchange([_READ_IDENTITY, *commands], decode=decode)
        for reply in replies:
            if isinstance(reply, Exception):
                raise translate(reply) from reply
        self._prove(_identity([each.decode() if isinstance(each, bytes) else each for each in replies[0]]), mark)
        return replies[1:]

    def call(self, *command: str) -> Any:
        return self.exchange([command])[0]

    def read_bytes(self, *command: str) -> bytes | None:
        """What a key holds as it is, which may be no text."""
        reply: bytes | None = self.exchange([command], decode=False)[0]
        return reply

    def close(self) -> None:
        self._wire.close()
        self.plain.close()

    # inside ----------------------------------------------------------------------------------------------------------
    def _require_bound(self) -> tuple[StoreIdentity, int]:
        """The store we belong to, and the commit mark before the call that is about to be made."""
        with self._lock:
            if self._bound is None:
                raise WrongStore("no store was chosen yet", "call bind() with the identity that was judged")
            return self._bound, self._mark

    def _accept(self, replies: list[Any], mark: int) -> list[Any]:
        bound, _ = self._require_bound()
        failure: StorageError | None = None
        seen = 0
        for reply in replies:
            if isinstance(reply, Exception):
                failure = failure or translate(reply)
            elif reply[0] == "WRONG_STORE" or int(reply[1]) < mark:
                found = StoreIdentity(reply[2], int(reply[3]), int(reply[1])) if reply[0] == "WRONG_STORE" else None
                found = found or StoreIdentity(bound.store_id, bound.epoch, int(reply[1]))
                failure = failure or describe_wrong_store(StoreIdentity(bound.store_id, bound.epoch, mark), found)
            else:
                seen = max(seen, int(reply[1]))
        with self._lock:
            self._mark = max(self._mark, seen)
        if failure is not None:
            raise failure
        return replies

    def _eval_plain(self, verb: str, *args: str) -> Any:
        return self.plain.call("EVAL", script(verb).text, "0", *args)

    def _greet(self, greeting: Greeting) -> None:
        """redis-py reconnects without telling, and the Redis that answers may be empty, older, or another one."""
        _, mark = self._require_bound()
        self._prove(_identity(greeting.call(*_READ_IDENTITY)), mark)

    def _prove(self, found: StoreIdentity | None, mark: int) -> None:
        bound, _ = self._require_bound()
        if found is None or (found.store_id, found.epoch) != (bound.store_id, bound.epoch) or found.commit < mark:
            raise describe_wrong_store(StoreIdentity(bound.store_id, bound.epoch, mark), found)


def _evalsha(verb: str, *args: str | bytes) -> Command:
    return ("EVALSHA", script(verb).sha, "0", *args)


def _identity(values: Sequence[str | None]) -> StoreIdentity | None:
    """Raises WrongStore for a format of another version; stores made before there was this field have the first."""
    store_id, epoch, commit, found = values
    if store_id is None:
        return None
    if found not in (None, FORMAT):
        problem = f"store {store_id} has format {found}, this version of midsentence knows format {FORMAT}"
        raise WrongStore(problem, "use the version that wrote it, or a newer one: nothing was changed")
    return StoreIdentity(store_id, int(epoch or 0), int(commit or 0))
