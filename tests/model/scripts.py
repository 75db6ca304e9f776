"""The scripts on a real server, as a store that a ``World`` can copy: what is explored is then the product, not the model of it."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import redis

from storage import keys
from storage.codec import job_record, log_entry
from storage.records import JobAnswer, JobRecord, StepWrites
from storage.redis_store import RedisJobStore
from tests.model.store import Message
from tests.servers import running_redis, valkey_binary

#: Read and write back what a key holds, by its type. All in one call: a state is left and entered thousands of times.
_READ = """
local read = {hash = 'HGETALL', set = 'SMEMBERS', stream = 'XRANGE', zset = 'ZRANGE'}
local more = {stream = {'-', '+'}, zset = {'0', '-1', 'WITHSCORES'}}
local all = {}
for _, key in ipairs(redis.call('KEYS', '*')) do
  local kind = redis.call('TYPE', key).ok
  all[#all + 1] = {key, kind, redis.call(read[kind], key, unpack(more[kind] or {}))}
end
return all
"""


class Server:
    """Holds one ``ScriptStore``'s state at a time."""

    def __init__(self, url: str) -> None:
        self.store = RedisJobStore(url, single_connection=True)
        self._raw = redis.Redis.from_url(url, decode_responses=True)
        self._read = self._raw.register_script(_READ)
        self._within: ScriptStore | None = None
        self._commit = 0  #: the store's counter never goes back here, else its client would refuse every state but the newest

    def enter(self, store: "ScriptStore") -> None:
        if self._within is store:
            return
        pipe = self._raw.pipeline(transaction=False)
        pipe.flushall()
        for key, kind, content in store.state:
            if kind == "hash":
                pipe.hset(key, mapping=dict(content))
            elif kind == "set":
                pipe.sadd(key, *content)
            elif kind == "zset":
                pipe.zadd(key, dict(content))
            else:
                for entry_id, fields in content:
                    pipe.xadd(key, dict(fields), id=entry_id)
        if store.state:
            pipe.hset(keys.STORE, "commit", str(self._commit))
        pipe.execute()
        self._within = store

    def read(self) -> tuple[Any, ...]:
        """(key, type, content) of each key, in order."""
        state = sorted((key, kind, tuple(_shape(kind, content))) for key, kind, content in self._read())
        self._commit = max([self._commit, *(int(dict(content)["commit"]) for key, _, content in state if key == keys.STORE)])
        return tuple(state)

    def close(self) -> None:
        self.store.close()
        self._raw.close()


def _shape(kind: str, content: list[Any]) -> Iterator[Any]:
    if kind in ("hash", "zset"):
        yield from sorted(zip(content[::2], content[1::2], strict=True))
    elif kind == "set":
        yield from sorted(content)
    else:
        yield from ((entry_id, tuple(zip(fields[::2], fields[1::2], strict=True))) for entry_id, fields in content)


class ScriptStore:
    """The verbs of ``ModelStore``, done by the scripts."""

    def __init__(self, server: Server, state: tuple[Any, ...] = ()) -> None:
        self._server, self.state = server, state

    def clone(self) -> "ScriptStore":
        return ScriptStore(self._server, self.state)

    def __getattr__(self, name: str) -> Any:
        """A verb of the store."""
        verb = getattr(self._server.store, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            self._server.enter(self)
            try:
                return verb(*args, **kwargs)
            finally:
                self.state = self._server.read()

        return call

    def key(self) -> tuple[Any, ...]:
        """Without times, and without the counter of commits."""
        return tuple(
            (key, content if kind == "stream" else tuple(pair for pair in content if not _passes(key, pair)))
            for key, kind, content in self.state
            if key != keys.EXPIRY
        )

    def deliver(self, engine_id: str, message: Message) -> JobAnswer:
        (answer,) = self.write_step(engine_id, message.incarnation, "", StepWrites(commits=(message.commit,))).commits
        return answer

    def record(self, job_id: str) -> JobRecord:
        return job_record(job_id, dict(self._content(keys.job(job_id))))

    def log(self, job_id: str) -> tuple[int, ...]:
        return tuple(log_entry(dict(fields)).token for _, fields in self._content(keys.log(job_id)))

    def _content(self, wanted: str) -> tuple[Any, ...]:
        return next((content for key, _, content in self.state if key == wanted), ())


def _passes(key: str, pair: Any) -> bool:
    return isinstance(pair, tuple) and (pair[0].endswith("_at") or (key == keys.STORE and pair[0] == "commit"))


@contextmanager
def script_store() -> Iterator[ScriptStore]:
    """On a server of its own, which need not bring anything to a disk."""
    with (
        TemporaryDirectory() as folder,
        running_redis(valkey_binary(), Path(folder), ("--appendonly", "no")) as running,
    ):
        server = Server(running.url)
        try:
            yield ScriptStore(server)
        finally:
            server.close()
