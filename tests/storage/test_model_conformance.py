"""Random ways through the model, each call made to the real scripts on a real server, too: answers and records are equal."""

import random

import pytest

from storage.audit import audit
from storage.errors import EngineDead
from storage.records import LogRead, StepWrites
from tests.model.explorer import walk
from tests.model.world import Budget, World
from tests.storage.backends import RedisBackend
from tests.storage.test_agreement import timeless

WALKS, EACH, STEPS = 500, 50, 40
BUDGET = Budget(kills=3, judgements=3, losses=6, doubles=3, cancels=1)


class Scripts:
    """The Redis store with the model's one verb of its own."""

    def __init__(self, store):
        self._store = store

    def __getattr__(self, name):
        return getattr(self._store, name)

    def deliver(self, engine_id, message):
        (answer,) = self._store.write_step(engine_id, message.incarnation, "", StepWrites(commits=(message.commit,))).commits
        return answer


class Mirrored(World):
    def __init__(self, scripts, **size):
        super().__init__(**size)
        self.scripts = scripts

    def _change(self, call):
        ours, theirs = (_outcome(call, store) for store in (self.store, self.scripts))
        if isinstance(ours, EngineDead):
            assert isinstance(theirs, EngineDead)
            raise ours
        assert timeless(ours) == timeless(theirs)
        return ours


def _outcome(call, store):
    try:
        return call(store)
    except EngineDead as error:
        return error


@pytest.mark.parametrize("first", range(0, WALKS, EACH))
def test_the_scripts_do_what_the_model_does(first, valkey):
    for seed in range(first, first + EACH):
        _walk_both(random.Random(seed), valkey)


def _walk_both(rng, valkey):
    redis = RedisBackend("model", valkey)
    try:
        size = {"workers": 2, "jobs": 2, "tokens": 3, "budget": BUDGET}
        store = redis.client()
        store.bind(store.create("store-1"))
        world = Mirrored(Scripts(store), **size)
        for job in world.submitted.values():
            store.submit(job, queue_limit=10)
        names = walk(world, rng, STEPS)
        assert len(names) > STEPS / 2
        for job_id in world.job_ids:
            read = [LogRead(job_id, 0, 100)]
            assert timeless(world.store.read(read)) == timeless(store.read(read)), names
        assert audit(valkey.url) == []
    finally:
        redis.close()
