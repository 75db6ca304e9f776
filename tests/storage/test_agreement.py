"""One random program against Redis and the in-memory store: every answer and all that can be seen afterwards must be equal."""

from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test

from storage import chain
from storage.audit import audit
from storage.errors import StorageError
from storage.records import Commit, Finish, JobError, JobStatus, LogRead, NewJob, OwnedJob, PageEntry, StepWrites
from tests.servers import RedisServer
from tests.storage.backends import MemoryBackend, RedisBackend, engine_info, tokens

JOBS = tuple(f"job-{i}" for i in range(6))
GROUPS = (("job-4", "job-5"), ("group-0", "group-1"), ("group-2", "group-3", "group-4"), ("group-5", "group-1"))
ALL = (*JOBS, *(f"group-{i}" for i in range(6)))
ENGINES = ("engine-1", "engine-2")
MODELS = ("model-a", "model-b")
TIMES = {"created_at", "started_at", "finished_at", "deadline_at", "now"}
FINISHES = (
    None, None, None, Finish(JobStatus.COMPLETED, "stop"), Finish(JobStatus.INCOMPLETE, "length"),
    Finish(JobStatus.FAILED, error=JobError("engine_error", "NaN")),
)  # fmt: skip


def timeless(value: Any) -> Any:
    """Times differ by the moment of the call; whether there is one must not."""
    if is_dataclass(value) and not isinstance(value, type):
        parts = {f.name: getattr(value, f.name) for f in fields(value)}
        return type(value).__name__, {name: (part is not None) if name in TIMES else timeless(part) for name, part in parts.items()}
    if isinstance(value, list | tuple):
        return [timeless(part) for part in value]
    return value


class Agreement(RuleBasedStateMachine):
    server: RedisServer

    def __init__(self) -> None:
        super().__init__()
        self.memory = MemoryBackend()
        self.redis = RedisBackend("agreement", self.server)
        self.stores = [self.memory.client(), self.redis.client()]
        self.lives = dict.fromkeys(ENGINES, "")
        self.life = 0
        self.given: dict[str, OwnedJob] = {}
        self.last: Callable[[Any], Any] | None = None

    def teardown(self) -> None:
        problems = audit(self.server.url)
        self.redis.close()
        assert problems == []

    def both(self, call: Callable[[Any], Any]) -> Any:
        """The same call to both; the answer of Redis."""
        self.last = call
        answers = [_outcome(call, store) for store in self.stores]
        assert timeless(answers[0]) == timeless(answers[1])
        return answers[1]

    @initialize()
    def create(self) -> None:
        for store in self.stores:
            store.bind(store.create("store-1"))
        # begin where things are under way: random programs seldom get there by themselves
        for engine in ENGINES:
            self.register(engine, "model-a", False, "boot-1", False, False, "p")
        for i, job_id in enumerate(JOBS[:4]):
            self.submit(job_id, "model-a", 15 * i, 0, None, None, "x", "", 100, 50)
        self.claim("engine-1", 12, 2, True)

    @rule(
        job_id=st.sampled_from(JOBS), model=st.sampled_from(MODELS), prompt=st.integers(0, 60),
        priority=st.sampled_from([0, 0, 5, -5]),
        deadline=st.sampled_from([None, None, 20.5, 300.25]), key=st.sampled_from([None, None, "k", ""]),
        body=st.sampled_from("xy"),
        tenant=st.sampled_from(["", "t"]), limit=st.sampled_from([2, 100]), max_tokens=st.sampled_from([3, 20, 50, 400]),
    )  # fmt: skip
    def submit(self, job_id, model, prompt, priority, deadline, key, body, tenant, limit, max_tokens) -> None:
        job = NewJob(job_id, f'{{"b":"{body}"}}', tuple(range(prompt)), model, max_tokens, body, priority, deadline, tenant, key)
        self.both(lambda store: store.submit(job, queue_limit=limit))

    @rule(
        ids=st.sampled_from(GROUPS), key=st.sampled_from([None, "k"]), body=st.sampled_from("xy"),
        limit=st.sampled_from([2, 4, 5, 100]), deadline=st.sampled_from([None, 20.5]),
    )  # fmt: skip
    def submit_group(self, ids, key, body, limit, deadline) -> None:
        jobs = [NewJob(i, f'{{"b":"{i}"}}', (1, 2), "model-a", 3, body, 0, deadline, "", key, group=ids[0]) for i in ids]
        self.both(lambda store: store.submit(*jobs, queue_limit=limit))

    @rule(
        engine=st.sampled_from(ENGINES), model=st.sampled_from(["model-a", "model-a", "model-b"]), blame=st.booleans(),
        boot=st.sampled_from(["boot-1", "boot-1", "boot-1", "boot-2"]), again=st.booleans(), seen=st.booleans(),
        pool=st.sampled_from("pppq"),
    )  # fmt: skip
    def register(self, engine, model, blame, boot, again, seen, pool) -> None:
        if not again or not self.lives[engine]:
            self.life += 1
        incarnation = self.lives[engine] if again and self.lives[engine] else f"inc-{self.life}"
        info = engine_info(engine, model_fingerprint=model, boot_id=boot, pool_id=f"{pool}-{engine}", device_pages=8)
        watched = {record.info.engine_id: (record.incarnation, record.beat) for record in self.stores[1].engines()}
        pair = watched.get(engine) if seen else None
        answer = self.both(lambda store: store.register(info, incarnation, blame=blame, seen=pair))
        if not isinstance(answer, str) and answer.outcome == "registered":
            self.lives[engine] = incarnation
            self.given.update({job.job_id: job for job in answer.owned})

    @rule(engine=st.sampled_from(ENGINES), free=st.integers(0, 12), limit=st.integers(0, 4), held=st.booleans())
    def claim(self, engine, free, limit, held) -> None:
        ids = tuple(self.given) if held else ()
        incarnation = self.lives[engine]
        answer = self.both(lambda store: store.claim(engine, incarnation, held=ids, free_pages=free, limit=limit))
        if not isinstance(answer, str):
            self.given.update({job.job_id: job for job in answer})

    @precondition(lambda self: self.given)
    @rule(data=st.data(), n=st.integers(1, 3), finish=st.sampled_from(FINISHES))
    def commit_what_comes_next(self, data, n, finish) -> None:
        self.commit(data, n, finish, 0, False, 0, False)

    @precondition(lambda self: self.given)
    @rule(
        data=st.data(), n=st.integers(0, 3), finish=st.sampled_from(FINISHES), off=st.sampled_from([0, 0, 1, -1]),
        stale=st.booleans(), replayed=st.integers(0, 2), wrong_chain=st.booleans(),
    )  # fmt: skip
    def commit(self, data, n, finish, off, stale, replayed, wrong_chain) -> None:
        job = self.given[data.draw(st.sampled_from(sorted(self.given)))]
        record = self.stores[1].get(job.job_id)
        engine = record.engine_id if record is not None and record.engine_id else ENGINES[0]
        ids = list(range(n))
        start = record.chain if record is not None else "00" * 16
        after = "ff" * 16 if wrong_chain and off > 0 else chain.extend_all(start, ids)
        length = max(0, (record.log_length if record is not None else 0) + off)
        commit = Commit(job.job_id, job.fence - int(stale and off != 0), length, after, tokens(*ids), finish, "cpu", 0, replayed, 1)
        pool = next((r.info.pool_id for r in self.stores[1].engines() if r.info.engine_id == engine), "none")
        incarnation = self.lives[engine]
        self.both(lambda store: store.write_step(engine, incarnation, pool, StepWrites((commit,))))

    @rule(engine=st.sampled_from(ENGINES), page=st.integers(0, 3), drop=st.booleans(), pool=st.sampled_from("pq"))
    def pages(self, engine, page, drop, pool) -> None:
        writes = StepWrites(publish={page: PageEntry("ab", page)}, drop=(page,) if drop else ())
        incarnation = self.lives[engine]
        self.both(lambda store: store.write_step(engine, incarnation, f"{pool}-{engine}", writes))

    @precondition(lambda self: self.given)
    @rule(data=st.data(), affinity=st.booleans(), stale=st.booleans())
    def release(self, data, affinity, stale) -> None:
        job = self.given[data.draw(st.sampled_from(sorted(self.given)))]
        job = replace(job, fence=job.fence - int(stale))
        engine = data.draw(st.sampled_from(ENGINES))
        incarnation = self.lives[engine]
        self.both(lambda store: store.release(engine, incarnation, [job], affinity=affinity))

    @rule(engine=st.sampled_from(ENGINES))
    def renew(self, engine) -> None:
        incarnation = self.lives[engine]
        self.both(lambda store: store.renew(engine, incarnation))

    @rule(engine=st.sampled_from(ENGINES), off=st.sampled_from([0, 0, 1]))
    def take_over(self, engine, off) -> None:
        for record in self.stores[1].engines():
            if record.info.engine_id == engine:
                judged = (engine, record.incarnation, record.beat + off)
                self.both(lambda store, judged=judged: store.take_over(*judged))

    @rule(job_id=st.sampled_from(ALL))
    def cancel(self, job_id) -> None:
        self.both(lambda store: store.cancel(job_id))

    @rule(job_id=st.sampled_from(JOBS))
    def fail(self, job_id) -> None:
        self.both(lambda store: store.fail(job_id, "code", "message"))

    @rule(seconds=st.sampled_from([17.3, 41.7, 503.1, 90001.9]))
    def advance(self, seconds) -> None:
        self.memory.advance(seconds)
        self.redis.advance(seconds)
        fresh = self.redis.client()  # a client remembers for a minute of real time what it touched
        fresh.bind(self.stores[1].identity())
        self.stores[1] = fresh

    @rule()
    def sweep_deadlines(self) -> None:
        self.both(lambda store: sorted(store.sweep_deadlines()))

    @rule(retention=st.sampled_from([100.0, 1000.0]), limit=st.sampled_from([1, 100]))
    def sweep_expired(self, retention, limit) -> None:
        self.both(lambda store: store.sweep_expired(retention, limit=limit))

    @rule()
    def read_logs(self) -> None:
        self.both(lambda store: store.read([LogRead(job_id, after, 2) for job_id in ALL for after in (0, 1)]))

    @precondition(lambda self: self.last is not None)
    @rule()
    def send_the_last_call_again(self) -> None:
        assert self.last is not None
        self.both(self.last)

    @rule(sure=st.sampled_from([False, False, False, True]))
    def raise_epoch(self, sure) -> None:
        if sure:
            self.both(lambda store: store.raise_epoch())
            self.last = None
            for store in self.stores:
                store.bind(store.identity())

    @invariant()
    def all_that_can_be_seen_is_equal(self) -> None:
        if not self.stores[1].identity():
            return
        self.quietly(lambda store: [store.get(job_id) for job_id in ALL])
        self.quietly(lambda store: (store.counts(), store.identity(), [store.queued(model) for model in MODELS]))
        self.quietly(lambda store: store.engines())
        self.quietly(lambda store: [store.pool_table(f"{pool}-{engine}") for pool in "pq" for engine in ENGINES])
        self.quietly(lambda store: (store.jobs(tenant=None, limit=3), store.jobs(tenant="t"), store.jobs(status=JobStatus.QUEUED)))

    def quietly(self, call: Callable[[Any], Any]) -> None:
        last = self.last
        self.both(call)
        self.last = last


def _outcome(call: Callable[[Any], Any], store: Any) -> Any:
    try:
        return call(store)
    except StorageError as error:
        return f"{type(error).__name__}: {error}"


@pytest.mark.timeout(120)
def test_redis_and_memory_agree(valkey: RedisServer) -> None:
    machine = type("AgreementOnValkey", (Agreement,), {"server": valkey})
    bounds = settings(
        max_examples=80, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck), print_blob=True
    )
    run_state_machine_as_test(machine, settings=bounds)
