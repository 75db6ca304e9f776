"""Redis and the ways to it. A request may be lost, arrive late or twice, or be cut inside its pipeline; an answer may be lost."""

from dataclasses import replace
from functools import partial

from storage.errors import StorageError, StoreUnavailable
from storage.records import JobStatus
from storage.store_file import describe_wrong_store

READS = {"identity", "get", "read", "engines", "pool_table", "counts", "jobs", "queued"}
WAKING = {"submit", "cancel", "release", "take_over"}


class Redis:
    """The one server: up, or away; its process may stand still, and it may come back without what it had not synced."""

    def __init__(self, store) -> None:
        self.store = store
        self.identity = store.create("store")
        store.sync()
        self.up, self.stands_still = True, False
        self.generation = 0  #: of its process: connections do not outlive it

    def execute(self, identity, name, args, kwargs):
        self.store.bind(identity)
        return getattr(self.store, name)(*args, **kwargs)

    def accept_as_it_is(self) -> None:
        """``recover --accept-store``."""
        self.identity = self.store.raise_epoch()
        self.store.sync()


class Connection:
    """A ``JobStore`` for one thread of one process, or for a client."""

    def __init__(self, world, who: str) -> None:
        self._world, self._who = world, who
        self._redis = world.redis
        self._identity = self._redis.identity
        self._generation = self._redis.generation
        self._mark = self._identity.commit

    def __getattr__(self, name):
        return partial(self._call, name)

    def _call(self, name, *args, **kwargs):
        world, redis, faults = self._world, self._redis, self._world.faults
        world.meanwhile()
        if not redis.up:
            raise StoreUnavailable("connection refused")
        if redis.stands_still:
            if name not in READS:
                self._late(name, args, kwargs)
            raise StoreUnavailable("timed out")
        self._greet()
        if world.happens(faults.lost_request):
            if name not in READS and world.happens(0.5):
                self._late(name, args, kwargs)
            raise StoreUnavailable("lost before it was executed, or late")
        if name == "write_step" and world.happens(faults.cut_pipeline):
            self._cut(*args)
        result = self._execute(name, args, kwargs)
        if name not in READS and world.happens(faults.doubled):
            self._late(name, args, kwargs)
        if world.happens(faults.lost_answer):
            world.note(self._who, f"{name}: answer lost")
            raise StoreUnavailable("the answer was lost")
        return result

    def _greet(self) -> None:
        """A new connection proves the mark, as ``storage.session`` does."""
        if self._generation != self._redis.generation:
            found = self._redis.store.identity()
            if found.commit < self._mark:
                raise describe_wrong_store(replace(self._identity, commit=self._mark), found)
            self._generation = self._redis.generation

    def _execute(self, name, args, kwargs):
        world = self._world
        with world.oracle.owners_commit(name, args):
            result = self._redis.execute(self._identity, name, args, kwargs)
        self._mark = self._redis.store.identity().commit
        if name not in READS:
            world.note(self._who, name, outcome(result))
            if name == "take_over" and result:
                world.count("jobs taken over", result)
            world.oracle.published(name, args)
        if name in WAKING:
            world.hint()
        return result

    def _late(self, name, args, kwargs) -> None:
        """The request is on its way, and nobody waits for its answer any more."""

        def arrive() -> None:
            if self._redis.up and not self._redis.stands_still:
                if name == "write_step":
                    self._world.hosts[args[0]].hears_itself_late(args[1])
                try:
                    self._execute(name, args, kwargs)
                except StorageError as error:
                    self._world.note(self._who, f"{name}, late", type(error).__name__)

        self._world.loose(f"{self._who}: {name}, late", arrive)

    def _cut(self, engine_id, incarnation, pool_id, writes) -> None:
        """Redis executes what arrived of a pipeline."""
        arrived = replace(writes, commits=writes.commits[: self._world.rng.randrange(len(writes.commits) + 1)], publish={}, drop=())
        if len(arrived.commits) == len(writes.commits) and self._world.happens(0.5):
            arrived = replace(arrived, drop=writes.drop)
        self._execute("write_step", (engine_id, incarnation, pool_id, arrived), {})
        raise StoreUnavailable("the connection broke in the middle of a pipeline")


def outcome(result) -> str:
    """What of an answer belongs into the trace: nothing that is random."""
    if hasattr(result, "commits"):
        return f"{[answer.value for answer in result.commits]} at {result.commit}"
    if hasattr(result, "owned"):
        return f"owned {[job.job_id for job in result.owned]}"
    if isinstance(result, tuple):
        return str([getattr(item, "job_id", item) for item in result])
    status = getattr(result, "status", None)
    return status.value if isinstance(status, JobStatus) else str(getattr(result, "outcome", result))
