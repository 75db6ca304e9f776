"""One random program against Redis and the in-memory store: every answer and all that can be seen afterwards must be equal.

While the network is bad every reply of a write is lost once: the very same call is sent again, and that must change nothing.
"""

from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test

from storage import chain
from storage.audit import audit
from storage.batch_records import BatchError, BatchOutput, NewFile
from storage.errors import StorageError, StoreUnavailable, WrongStore
from storage.records import Commit, Finish, JobError, JobStatus, LogRead, NewJob, OwnedJob, PageEntry, StepWrites
from tests.profiles import examples
from tests.servers import RedisServer
from tests.storage.backends import MemoryBackend, RedisBackend, engine_info, line_of, new_batch, tokens

JOBS = tuple(f"job-{i}" for i in range(6))
GROUPS = (("job-4", "job-5"), ("group-0", "group-1"), ("group-2", "group-3", "group-4"), ("group-5", "group-1"))
ALL = (*JOBS, *(f"group-{i}" for i in range(6)))
FILES, BATCHES = ("file-0", "file-1"), ("batch-0", "batch-1")
LINES = tuple(f"line-{batch}-{line}{choice}" for batch in BATCHES for line in (1, 2, 3) for choice in ("", "-1"))
ALL = (*ALL, *LINES)
ENGINES = ("engine-1", "engine-2")
APIS = ("api-1", "api-2")
MODELS = ("model-a", "model-b")
NOW_AND_THEN = st.sampled_from([False, False, False, True])
TIMES = {"created_at", "started_at", "finished_at", "deadline_at", "expires_at", "now"}
FINISHES = (
    None, None, None, Finish(JobStatus.COMPLETED, "stop"), Finish(JobStatus.INCOMPLETE, "length"),
    Finish(JobStatus.FAILED, error=JobError("engine_error", "NaN")),
)  # fmt: skip


def timeless(value: Any) -> Any:
    """Times differ by the moment of the call; whether there is one must not."""
    if is_dataclass(value) and not isinstance(value, type):
        parts = {f.name: getattr(value, f.name) for f in fields(value)}
        if "reached" in parts:
            parts["reached"] = sorted(parts["reached"])
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
        self.lives: dict[str, list[str]] = {engine: [""] for engine in ENGINES}  # incarnations, the present one last
        self.life = 0
        self.replies_are_lost = False
        self.given: dict[str, OwnedJob] = {}
        self.last: Callable[[Any], Any] | None = None

    def teardown(self) -> None:
        self.redis.close()

    def both(self, call: Callable[[Any], Any]) -> Any:
        """The same call to both; the answer of Redis."""
        answers = [_outcome(call, store) for store in self.stores]
        assert timeless(answers[0]) == timeless(answers[1])
        return answers[1]

    def write(self, call: Callable[[Any], Any]) -> Any:
        """A call that may be sent twice."""
        self.last = call
        answer = self.both(call)
        if self.replies_are_lost:
            before = self.all_that_can_be_seen(self.stores[1])
            answer = self.both(call)
            assert self.all_that_can_be_seen(self.stores[1]) == before
        return answer

    def incarnation(self, engine: str, past: bool = False) -> str:
        return self.lives[engine][0 if past else -1]

    def waits(self, job_id: str) -> bool:
        record = self.stores[1].get(job_id)
        return record is not None and record.status is JobStatus.QUEUED

    @staticmethod
    def all_that_can_be_seen(store: Any) -> Any:
        return (
            [store.get(job_id) for job_id in ALL],
            store.counts(),
            [store.queued(model) for model in MODELS],
            store.engines(),
            store.apis(),
            [store.pool_table(f"{pool}-{engine}") for pool in "pq" for engine in ENGINES],
            [store.jobs(tenant=None, limit=3), store.jobs(tenant="t"), store.jobs(status=JobStatus.QUEUED)],
            [store.jobs(tenant=tenant, stored=True, oldest_first=True, limit=2) for tenant in (None, "", "t")],
            [store.batches.files(tenant, limit=1) for tenant in ("", "t")],
            [store.batches.batch(batch_id) for batch_id in BATCHES],
            [store.batches.batch_page("", limit=1), store.batches.live_batches(), store.batches.counts()],
        )

    @initialize()
    def create(self) -> None:
        for store in self.stores:
            store.bind(store.create("store-1"))
        # begin where things are under way: random programs seldom get there by themselves
        for engine in ENGINES:
            self.register(engine, "model-a", False, "boot-1", False, False, "p")
        for i, job_id in enumerate(JOBS[:4]):
            self.submit(job_id, "model-a", 15 * i, 0, None, None, "x", "", 100, 50, None)
        self.claim("engine-1", 12, 2, True)
        self.upload("file-0", b"a", "", True)
        self.create_batch("batch-0", "file-0", 1e6, 2)
        self.begin_batch("batch-0", 3, True)
        self.feed("batch-0", 1, 2, False, 3, 100)

    @rule(
        job_id=st.sampled_from(JOBS), model=st.sampled_from(MODELS), prompt=st.integers(0, 60),
        priority=st.sampled_from([0, 0, 5, -5]),
        deadline=st.sampled_from([None, None, 20.5, 300.25]), key=st.sampled_from([None, None, "k", ""]),
        body=st.sampled_from("xy"),
        tenant=st.sampled_from(["", "t"]), limit=st.sampled_from([2, 100]), max_tokens=st.sampled_from([3, 20, 50, 400]),
        tenant_limit=st.sampled_from([None, 1, 3]), api=st.sampled_from(["", *APIS]), stored=st.booleans(),
    )  # fmt: skip
    def submit(
        self, job_id, model, prompt, priority, deadline, key, body, tenant, limit, max_tokens, tenant_limit, api="", stored=False
    ) -> None:
        job = NewJob(job_id, f'{{"b":"{body}"}}', tuple(range(prompt)), model, max_tokens, body, priority, deadline, tenant, key)
        job = replace(job, served_by=api, stored=stored)
        self.write(lambda store: store.submit(job, queue_limit=limit, tenant_limit=tenant_limit))

    @rule(
        ids=st.sampled_from(GROUPS), key=st.sampled_from([None, "k"]), body=st.sampled_from("xy"),
        limit=st.sampled_from([2, 4, 5, 100]), deadline=st.sampled_from([None, 20.5]), api=st.sampled_from(["", *APIS]),
        prompts=st.integers(1, 3),
    )  # fmt: skip
    def submit_group(self, ids, key, body, limit, deadline, api, prompts) -> None:
        jobs = [NewJob(i, f'{{"b":"{i}"}}', (1, 2), "model-a", 3, body, 0, deadline, "", key, group=ids[0]) for i in ids]
        jobs = [replace(job, served_by=api, prompt_token_ids=(1,) * (i % prompts)) for i, job in enumerate(jobs, 1)]
        self.write(lambda store: store.submit(*jobs, queue_limit=limit))

    @rule(
        engine=st.sampled_from(ENGINES), model=st.sampled_from(["model-a", "model-a", "model-b"]), blame=st.booleans(),
        boot=st.sampled_from(["boot-1", "boot-1", "boot-1", "boot-2"]), again=st.booleans(), seen=st.booleans(),
        pool=st.sampled_from("pppq"),
    )  # fmt: skip
    def register(self, engine, model, blame, boot, again, seen, pool) -> None:
        self.life += 1
        incarnation = (self.incarnation(engine) if again else "") or f"inc-{self.life}"
        info = engine_info(engine, model_fingerprint=model, boot_id=boot, pool_id=f"{pool}-{engine}", device_pages=8)
        watched = {record.info.engine_id: (record.incarnation, record.beat) for record in self.stores[1].engines()}
        pair = watched.get(engine) if seen else None
        answer = self.write(lambda store: store.register(info, incarnation, blame=blame, seen=pair))
        if not isinstance(answer, str) and answer.outcome == "registered":
            self.lives[engine].append(incarnation)
            self.given.update({job.job_id: job for job in answer.owned})

    @rule(
        engine=st.sampled_from(ENGINES), free=st.integers(0, 12), limit=st.integers(0, 4), held=st.booleans(), past=NOW_AND_THEN
    )  # fmt: skip
    def claim(self, engine, free, limit, held, past=False) -> None:
        # What an engine released or lost it dropped before it claims: it holds nothing that waits in the queue.
        ids = tuple(job_id for job_id in self.given if not self.waits(job_id)) if held else ()
        incarnation = self.incarnation(engine, past)
        answer = self.write(lambda store: store.claim(engine, incarnation, held=ids, free_pages=free, limit=limit))
        if not isinstance(answer, str):
            self.given.update({job.job_id: job for job in answer})

    @precondition(lambda self: self.given)
    @rule(data=st.data(), n=st.integers(1, 3), finish=st.sampled_from(FINISHES))
    def commit_what_comes_next(self, data, n, finish) -> None:
        self.commit(data, n, finish, 0, False, 0, False, False)

    @precondition(lambda self: self.given)
    @rule(
        data=st.data(), n=st.integers(0, 3), finish=st.sampled_from(FINISHES), off=st.sampled_from([0, 0, 1, -1]),
        stale=st.booleans(), replayed=st.integers(0, 2), wrong_chain=st.booleans(), past=NOW_AND_THEN,
    )  # fmt: skip
    def commit(self, data, n, finish, off, stale, replayed, wrong_chain, past) -> None:
        job = self.given[data.draw(st.sampled_from(sorted(self.given)))]
        record = self.stores[1].get(job.job_id)
        engine = record.engine_id if record is not None and record.engine_id else ENGINES[0]
        ids = list(range(n))
        start = record.chain if record is not None else "00" * 16
        after = "ff" * 16 if wrong_chain and off > 0 else chain.extend_all(start, ids)
        length = max(0, (record.log_length if record is not None else 0) + off)
        commit = Commit(job.job_id, job.fence - int(stale and off != 0), length, after, tokens(*ids), finish, "cpu", 0, replayed, 1)
        pool = next((r.info.pool_id for r in self.stores[1].engines() if r.info.engine_id == engine), "none")
        incarnation = self.incarnation(engine, past)
        self.write(lambda store: store.write_step(engine, incarnation, pool, StepWrites((commit,))))

    @rule(
        engine=st.sampled_from(ENGINES), publish=st.sets(st.integers(0, 3)), drop=st.sets(st.integers(0, 3)),
        pool=st.sampled_from("ppq"), past=NOW_AND_THEN,
    )  # fmt: skip
    def pages(self, engine, publish, drop, pool, past) -> None:
        writes = StepWrites(publish={page: PageEntry("ab", page) for page in publish}, drop=tuple(drop))
        incarnation = self.incarnation(engine, past)
        self.write(lambda store: store.write_step(engine, incarnation, f"{pool}-{engine}", writes))

    @precondition(lambda self: self.given)
    @rule(data=st.data(), affinity=st.booleans(), stale=st.booleans(), past=NOW_AND_THEN)
    def release(self, data, affinity, stale, past) -> None:
        job = self.given[data.draw(st.sampled_from(sorted(self.given)))]
        job = replace(job, fence=job.fence - int(stale))
        engine = data.draw(st.sampled_from(ENGINES))
        incarnation = self.incarnation(engine, past)
        self.write(lambda store: store.release(engine, incarnation, [job], affinity=affinity))

    @rule(engine=st.sampled_from(ENGINES), past=NOW_AND_THEN)
    def renew(self, engine, past) -> None:
        """Sent twice it counts twice: a beat says no more than that somebody lives."""
        incarnation = self.incarnation(engine, past)
        self.both(lambda store: store.renew(engine, incarnation))

    @rule(api=st.sampled_from(APIS))
    def beat(self, api) -> None:
        """Sent twice it counts twice, like a renew."""
        self.both(lambda store: store.beat(api))

    @rule(engine=st.sampled_from(ENGINES), off=st.sampled_from([0, 0, 0, 1, -1]), past=NOW_AND_THEN)
    def take_over(self, engine, off, past) -> None:
        """``off`` or ``past``: the pair that was judged is no longer the engine's."""
        for record in self.stores[1].engines():
            if record.info.engine_id == engine:
                judged = (engine, self.incarnation(engine, past), record.beat + off)
                self.write(lambda store, judged=judged: store.take_over(*judged))

    @rule(job_id=st.sampled_from(ALL))
    def cancel(self, job_id) -> None:
        self.write(lambda store: store.cancel(job_id))

    @rule(job_id=st.sampled_from(ALL), metadata=st.sampled_from(['{"a":"b"}', "{}"]))
    def describe(self, job_id, metadata) -> None:
        self.write(lambda store: store.describe(job_id, metadata))

    @rule(job_ids=st.lists(st.sampled_from(ALL), min_size=1, max_size=2))
    def delete(self, job_ids) -> None:
        self.write(lambda store: store.delete(*job_ids))

    @rule(job_id=st.sampled_from(JOBS))
    def fail(self, job_id) -> None:
        self.write(lambda store: store.fail(job_id, "code", "message"))

    @rule(
        file_id=st.sampled_from(FILES),
        part=st.sampled_from([b"a", b"bc"]),
        tenant=st.sampled_from(["", "", "t"]),
        end=st.booleans(),
    )
    def upload(self, file_id, part, tenant, end) -> None:
        self.write(lambda store: store.batches.put_chunk(f"up-{file_id}", 0, part, limit=3))
        if end:
            new = NewFile(file_id, f"up-{file_id}", 1, len(part), "sha", "name", tenant=tenant)
            self.write(lambda store: store.batches.create_file(new, limit=1))

    @rule(file_id=st.sampled_from(FILES), dropped=st.booleans())
    def end_a_file(self, file_id, dropped) -> None:
        verb = (lambda store: store.batches.drop_upload(f"up-{file_id}")) if dropped else None
        self.both(verb or (lambda store: store.batches.delete_file(file_id)))

    @rule(
        batch_id=st.sampled_from(BATCHES),
        file_id=st.sampled_from(FILES),
        seconds=st.sampled_from([30.0, 1e6]),
        limit=st.integers(1, 2),
    )
    def create_batch(self, batch_id, file_id, seconds, limit) -> None:
        self.write(lambda store: new_batch(store, batch_id, file_id, limit=limit, window_seconds=seconds))

    @rule(batch_id=st.sampled_from(BATCHES), total=st.integers(1, 3), good=st.sampled_from([True, True, False]))
    def begin_batch(self, batch_id, total, good) -> None:
        errors = [] if good else [BatchError("code", "message", "param", 1)]
        self.write(lambda store: store.batches.begin_batch(batch_id, total, errors))

    @rule(
        batch_id=st.sampled_from(BATCHES), line=st.integers(1, 2), choices=st.integers(1, 2), failed=NOW_AND_THEN,
        window=st.integers(1, 3), limit=st.sampled_from([2, 100]),
    )  # fmt: skip
    def feed(self, batch_id, line, choices, failed, window, limit) -> None:
        record = self.stores[1].batches.batch(batch_id)
        total = 0 if record is None else record.total
        error = JobError("code", "message") if failed else None
        lines = [line_of(i, batch_id=batch_id, choices=choices, error=error) for i in (line, line + 1) if i <= total]
        if lines:  # else nothing is sent, and there is nothing to refuse
            self.write(lambda store: store.batches.feed(batch_id, lines, window=window, queue_limit=limit))

    @rule(batch_id=st.sampled_from(BATCHES))
    def cancel_batch(self, batch_id) -> None:
        self.write(lambda store: store.batches.cancel_batch(batch_id))

    @rule(batch_id=st.sampled_from(BATCHES), which=st.sampled_from(BatchOutput))
    def delete_output(self, batch_id, which) -> None:
        self.write(lambda store: store.batches.delete_output(batch_id, which))

    @rule(batch_id=st.sampled_from(BATCHES))
    def advance_batch(self, batch_id) -> None:
        self.both(lambda store: store.batches.advance_batch(batch_id))

    @rule(batch_id=st.sampled_from(BATCHES))
    def touch_batch(self, batch_id) -> None:
        self.write(lambda store: store.batches.touch_batch(batch_id))

    @rule(retention=st.sampled_from([10.0, 1000.0]), limit=st.sampled_from([1, 100]), of_files=st.booleans())
    def sweep_batches(self, retention, limit, of_files) -> None:
        if of_files:
            self.both(lambda store: store.batches.sweep_files(retention, limit=limit))
        else:
            self.both(lambda store: store.batches.sweep_batches(retention, limit=limit))

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
        """Whoever still belongs to the old epoch is refused, whatever it asks."""
        if sure and self.last is not None:
            self.both(lambda store: store.raise_epoch())
            assert self.both(self.last) == "WrongStore"
            for store in self.stores:
                store.bind(store.identity())

    @rule(lost=st.booleans())
    def network(self, lost) -> None:
        self.replies_are_lost = lost

    @rule(sure=st.sampled_from([False, False, True]))
    def kill_and_restart_the_server(self, sure) -> None:
        if sure:
            self.server.restart()

    @invariant()
    def both_show_the_same(self) -> None:
        if self.stores[1].identity():
            self.both(self.all_that_can_be_seen)
            self.both(lambda store: store.identity())

    @invariant()
    def nothing_is_out_of_place(self) -> None:
        assert audit(self.server.url) == []


def _outcome(call: Callable[[Any], Any], store: Any) -> Any:
    while True:
        try:
            return call(store)
        except WrongStore as error:
            return type(error).__name__  # its words tell of counters, and Redis knows more of them
        except StoreUnavailable:  # a connection from before a restart: unknown, so the same again
            continue
        except StorageError as error:
            return f"{type(error).__name__}: {error}"


@pytest.mark.timeout(400)
def test_redis_and_memory_agree(valkey: RedisServer) -> None:
    machine = type("AgreementOnValkey", (Agreement,), {"server": valkey})
    bounds = settings(max_examples=examples(80), stateful_step_count=40, suppress_health_check=list(HealthCheck))
    run_state_machine_as_test(machine, settings=bounds)
