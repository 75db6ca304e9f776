"""``RedisJobStore``: the job store of production. Each verb is one script (``lua/``); here is only what goes in and out."""

import time
from collections.abc import Sequence
from typing import Any

from storage import keys
from storage.codec import (
    MUTABLE,
    changed_record,
    engine_fields,
    engine_record,
    group_arguments,
    job_record,
    log_arguments,
    log_entry,
    owned_jobs,
    page_entry,
    page_text,
    pairs,
)
from storage.errors import EngineDead, StoreFull
from storage.failpoints import hit
from storage.hints import HintReader, subscriber
from storage.known_records import Known, KnownRecords
from storage.records import (
    ApiRecord,
    Commit,
    EngineInfo,
    EngineRecord,
    JobAnswer,
    JobPage,
    JobRecord,
    JobStatus,
    LogRead,
    LogSlice,
    NewJob,
    OwnedJob,
    PageEntry,
    Registered,
    RegisterOutcome,
    Renewed,
    StepAnswers,
    StepWrites,
    StoreIdentity,
    SubmitOutcome,
    Submitted,
)
from storage.redis_batches import RedisBatchStore
from storage.rewrite import FileRewrite
from storage.rules import check_commit, check_group, check_sweep, parse_cursor
from storage.server import ServerInfo, check_settings, memory_use, server_info
from storage.session import Call, Session
from storage.vitals import RedisVitals
from storage.wire import Command

#: Submits stop here, so that commits of what runs can use the rest (PROTOCOL.md 5).
SUBMIT_UP_TO = 0.8
_KNOWN_BYTES = 64 << 20
_TOUCH_EVERY = 60.0


class RedisJobStore:
    """Thread-safe. ``single_connection``: answers come in the order of the calls (the engine needs that: PROTOCOL.md 2)."""

    def __init__(
        self, url: str, *, single_connection: bool = False, timeout: float = 5.0, client_name: str = "midsentence"
    ) -> None:
        self._session = Session(url, connections=1 if single_connection else 64, timeout=timeout, client_name=client_name)
        self._rewrite = FileRewrite(self._session)
        self.batches = RedisBatchStore(self._session, self._refuse_when_full)
        self._hints = HintReader(url, timeout=timeout, client_name=f"{client_name}-hints")
        self._subscriber = lambda: subscriber(url, timeout=timeout, client_name=f"{client_name}-vitals")
        # A stream's reader asks for a record many times a second; an engine asks for each job once.
        self._known = KnownRecords(0 if single_connection else _KNOWN_BYTES)
        self._touched: dict[str, float] = {}
        self._memory_checked = 0.0
        self._memory_full = False

    # identity --------------------------------------------------------------------------------------------------------
    def identity(self) -> StoreIdentity | None:
        return self._session.identity()

    def create(self, store_id: str) -> StoreIdentity:
        return self._session.create(store_id)

    def bind(self, identity: StoreIdentity) -> None:
        self._session.bind(identity)

    def raise_epoch(self) -> StoreIdentity:
        return self._session.raise_epoch()

    def server_info(self) -> ServerInfo:
        return server_info(self._session.plain)

    def check_settings(self, allow_weak: bool = False) -> list[str]:
        """Raises StoreMisconfigured naming each setting that would lose acknowledged writes; answers with warnings."""
        return check_settings(self._session.plain, allow_weak=allow_weak)

    # clients ---------------------------------------------------------------------------------------------------------
    def submit(self, *jobs: NewJob, queue_limit: int, tenant_limit: int | None = None) -> Submitted:
        check_group(jobs)
        self._refuse_when_full()
        first = jobs[0]
        digest = "" if first.idempotency_key is None else keys.idempotency_digest(first.tenant, first.idempotency_key)
        deadline = "" if first.deadline_seconds is None else repr(float(first.deadline_seconds))
        limits = (str(queue_limit), "" if tenant_limit is None else str(tenant_limit))
        hit("submit.before_send")
        word, _, job_ids = self._session.run("submit", *limits, deadline, digest, *group_arguments(jobs))
        hit("submit.after_reply")
        return Submitted(SubmitOutcome(word.lower()), tuple(job_ids))

    def _refuse_when_full(self) -> None:
        now = time.monotonic()
        if now - self._memory_checked > 1.0:
            self._memory_full = memory_use(self._session.plain) > SUBMIT_UP_TO
            self._memory_checked = now
        if self._memory_full:
            raise StoreFull("Redis uses more than 80 % of its maxmemory", "raise maxmemory or let finished jobs expire")

    def get(self, job_id: str) -> JobRecord | None:
        flat = self._session.call("HGETALL", keys.job(job_id))
        return job_record(job_id, pairs(flat)) if flat else None

    def jobs(
        self,
        *,
        status: JobStatus | None = None,
        tenant: str | None = "",
        limit: int = 20,
        cursor: str | None = None,
        stored: bool = False,
        oldest_first: bool = False,
    ) -> JobPage:
        after = None if cursor is None else f"({parse_cursor(cursor)}"
        index = keys.index("stored" if stored else status or "all", tenant)
        wanted = (
            ("ZRANGEBYSCORE", index, after or "-inf", "+inf")
            if oldest_first
            else ("ZREVRANGEBYSCORE", index, after or "+inf", "-inf")
        )
        flat = self._session.call(*wanted, "WITHSCORES", "LIMIT", "0", str(limit + 1))
        orders = dict(zip(flat[::2], flat[1::2], strict=True))
        page = list(orders)[:limit]
        found = self._session.exchange([("HGETALL", keys.job(job_id)) for job_id in page])
        records = (job_record(job_id, pairs(fields)) for job_id, fields in zip(page, found, strict=True) if fields)
        more = len(orders) > limit and page
        return JobPage(
            tuple(record for record in records if status is None or record.status == status),
            str(int(float(orders[page[-1]]))) if more else None,
        )

    def read(self, reads: Sequence[LogRead]) -> list[LogSlice | None]:
        commands: list[Command] = []
        for read in reads:
            commands.append(("HMGET", keys.job(read.job_id), *MUTABLE))
            commands.append(("XRANGE", keys.log(read.job_id), f"{read.after + 1}-0", "+", "COUNT", str(read.limit)))
        replies = self._session.exchange(commands)
        slices: list[LogSlice | None] = []
        for read, values, stream in zip(reads, replies[::2], replies[1::2], strict=True):
            record = self._complete(read.job_id, tuple(values))
            entries = tuple(log_entry(pairs(fields)) for _, fields in stream)
            slices.append(None if record is None else LogSlice(record, read.after, entries))
        ended = [piece.record for piece in slices if piece is not None and piece.record.status.terminal]
        self._touch([record.job_id for record in ended if not record.batch])  # a batch's jobs go with it
        return slices

    def _complete(self, job_id: str, changing: tuple[Any, ...]) -> JobRecord | None:
        """The record as it was when ``changing`` was read: a later one would count tokens that the log read beside it has not."""
        mutable = {name: value for name, value in zip(MUTABLE, changing, strict=True) if value is not None}
        if "status" not in mutable:
            return None
        known = self._known.get(job_id, int(mutable["order"]))
        if known is not None and known.changing == changing:
            return known.record
        if known is not None:
            record = changed_record(known.record, mutable)
        else:
            fixed = pairs(self._session.call("HGETALL", keys.job(job_id)))
            if not fixed:
                return None
            record = job_record(job_id, {**fixed, **mutable})
        self._known.keep(Known(record, changing))
        return record

    def _touch(self, job_ids: Sequence[str]) -> None:
        """Tells the sweep that somebody reads a finished job; once a minute, for it costs an fsync."""
        now = time.monotonic()
        due = [job_id for job_id in job_ids if now - self._touched.get(job_id, -_TOUCH_EVERY) >= _TOUCH_EVERY]
        if due:
            self._session.run_all([Call("touch", (job_id,)) for job_id in due])
            self._touched = {j: at for j, at in self._touched.items() if now - at < _TOUCH_EVERY} | dict.fromkeys(due, now)

    def cancel(self, job_id: str) -> JobRecord | None:
        answer = self._session.run("cancel", job_id)
        hit("cancel.after_reply")
        return self._changed(job_id, answer)

    def describe(self, job_id: str, metadata: str) -> JobRecord | None:
        return self._changed(job_id, self._session.run("describe", job_id, metadata))

    def fail(self, job_id: str, code: str, message: str) -> JobRecord | None:
        return self._changed(job_id, self._session.run("fail", job_id, code, message))

    def delete(self, *job_ids: str) -> int:
        _, _, deleted = self._session.run("delete", *job_ids)
        return int(deleted)

    def _changed(self, job_id: str, answer: Sequence[object]) -> JobRecord | None:
        flat = answer[2] if len(answer) > 2 else None
        return job_record(job_id, pairs(flat)) if isinstance(flat, list) else None

    def wait_hint(self, timeout: float, *, tokens: bool = True) -> frozenset[str]:
        return self._hints.wait(timeout, tokens=tokens)

    def queued(self, model_fingerprint: str) -> int:
        return int(self._session.call("ZCARD", keys.queue(model_fingerprint)))

    def counts(self) -> dict[JobStatus, int]:
        counts = pairs(self._session.call("HGETALL", keys.COUNTS))
        return {status: int(counts.get(status, "0")) for status in JobStatus}

    # engines ---------------------------------------------------------------------------------------------------------
    def register(self, info: EngineInfo, incarnation: str, *, blame: bool, seen: tuple[str, int] | None = None) -> Registered:
        seen_incarnation, seen_beat = ("", "") if seen is None else (seen[0], str(seen[1]))
        fields = [text for pair in engine_fields(info).items() for text in pair]
        word, _, *rest = self._session.run(
            "register", info.engine_id, incarnation, str(int(blame)), seen_incarnation, seen_beat,
            info.boot_id, info.model_fingerprint, info.pool_id, *fields,
        )  # fmt: skip
        hit("register.after")
        if word == "DEAD":
            raise EngineDead(f"engine {info.engine_id} was declared dead as incarnation {incarnation}")
        outcome = RegisterOutcome(word.lower())
        if outcome is RegisterOutcome.REGISTERED:
            return Registered(outcome, owned_jobs(rest[0]), tuple(rest[1].split()))
        return Registered(outcome, holder=engine_record(info.engine_id, pairs(rest[0]), rest[1]))

    def claim(self, engine_id: str, incarnation: str, *, held: Sequence[str], free_pages: int, limit: int) -> tuple[OwnedJob, ...]:
        answer = self._session.run_alive("claim", engine_id, incarnation, str(free_pages), str(limit), *held)
        hit("claim.after")
        return owned_jobs(answer[2])

    def write_step(self, engine_id: str, incarnation: str, pool_id: str, writes: StepWrites) -> StepAnswers:
        calls = [_commit_call(engine_id, incarnation, commit) for commit in writes.commits]
        if writes.drop:
            calls.append(Call("drop", (engine_id, incarnation, pool_id, *map(str, writes.drop))))
        if writes.publish:
            entries = [text for page, entry in writes.publish.items() for text in (str(page), page_text(entry))]
            calls.append(Call("publish", (engine_id, incarnation, pool_id, *entries)))
        finishes = any(commit.finish is not None for commit in writes.commits)
        hit("commit.before_send")
        if finishes:
            hit("finish.before_send")
        answers = self._session.run_all(calls, after_send="commit.after_send")
        hit("commit.after_reply")
        if finishes:
            hit("finish.after_reply")
        if any(answer[0] == "DEAD" for answer in answers):
            raise EngineDead(f"engine {engine_id} was declared dead as incarnation {incarnation}")
        words = tuple(JobAnswer(answer[0].lower()) for answer in answers[: len(writes.commits)])
        return StepAnswers(words, self._session.mark if not answers else max(int(answer[1]) for answer in answers))

    def release(self, engine_id: str, incarnation: str, jobs: Sequence[OwnedJob], *, affinity: bool) -> tuple[JobAnswer, ...]:
        hit("release.before")
        flag = str(int(affinity))
        answers = self._session.run_all(
            [Call("release", (engine_id, incarnation, job.job_id, str(job.fence), flag)) for job in jobs]
        )
        if any(answer[0] == "DEAD" for answer in answers):
            raise EngineDead(f"engine {engine_id} was declared dead as incarnation {incarnation}")
        return tuple(JobAnswer(answer[0].lower()) for answer in answers)

    def renew(self, engine_id: str, incarnation: str) -> Renewed:
        hit("renew.before")
        _, commit, owned, now = self._session.run_alive("renew", engine_id, incarnation)
        return Renewed(owned_jobs(owned), float(now), int(commit))

    def take_over(self, engine_id: str, incarnation: str, beat: int) -> int:
        moved = int(self._session.run("take_over", engine_id, incarnation, str(beat))[2])
        hit("take_over.after")
        return moved

    def engines(self) -> list[EngineRecord]:
        ids = sorted(self._session.call("SMEMBERS", keys.ENGINES))
        replies = self._session.exchange(
            [command for i in ids for command in (("HGETALL", keys.engine(i)), ("SMEMBERS", keys.owned(i)))]
        )
        found = zip(ids, replies[::2], replies[1::2], strict=True)
        return [engine_record(engine_id, pairs(fields), owned) for engine_id, fields, owned in found if fields]

    def pool_table(self, pool_id: str) -> dict[int, PageEntry]:
        (seconds, _), entries = self._session.exchange([("TIME",), ("HGETALL", keys.pool(pool_id))])
        return {int(page): page_entry(text, float(seconds)) for page, text in pairs(entries).items()}

    # apis ------------------------------------------------------------------------------------------------------------
    def apis(self) -> list[ApiRecord]:
        incarnations = sorted(pairs(self._session.call("HGETALL", keys.APIS)))
        # Beats are read after the jobs: who submits one more in between is seen to have beaten.
        *served, flat = self._session.exchange([*(("SMEMBERS", keys.served(api)) for api in incarnations), ("HGETALL", keys.APIS)])
        beats = pairs(flat)
        found = zip(incarnations, served, strict=True)
        return [ApiRecord(api, int(beats[api]), tuple(sorted(job_ids))) for api, job_ids in found if api in beats]

    def beat(self, api: str) -> None:
        self._session.run("beat", api)

    # vitals ----------------------------------------------------------------------------------------------------------
    def publish_vitals(self, text: str) -> int:
        return int(self._session.plain.call("PUBLISH", keys.VITALS, text))

    def vitals(self) -> RedisVitals:
        return RedisVitals(self._subscriber)

    # sweeps ----------------------------------------------------------------------------------------------------------
    def sweep_deadlines(self) -> tuple[str, ...]:
        return tuple(self._session.run("sweep_deadlines")[2])

    def sweep_expired(self, retention_seconds: float, *, limit: int = 100) -> int:
        retention = repr(float(retention_seconds))
        _, _, due, finished, job_ids = self._session.run("expired", "expiry", retention, str(limit))
        check_sweep(due=due, finished=finished, limit=limit)
        answers = self._session.run_all([Call("purge", (job_id, retention)) for job_id in job_ids])
        return sum(answer[0] == "OK" for answer in answers)

    def rewrite_file(self, interval: float) -> bool:
        return self._rewrite.ask(interval)

    def close(self) -> None:
        self._hints.close()
        self._session.close()


def _commit_call(engine_id: str, incarnation: str, commit: Commit) -> Call:
    check_commit(commit)
    finish = ("", "", "", "")
    if commit.finish is not None:
        error = commit.finish.error
        reason = commit.finish.finish_reason
        finish = (commit.finish.status.value, reason, error.code if error else "", error.message if error else "")
    counters = (commit.cached_tokens, commit.tokens_replayed, commit.pages_restored)
    return Call(
        "commit",
        (
            engine_id, incarnation, commit.job_id, str(commit.fence), str(commit.expected), commit.chain,
            commit.arithmetic_fingerprint, *map(str, counters), *finish, *log_arguments(commit.tokens),
        ),
    )  # fmt: skip
