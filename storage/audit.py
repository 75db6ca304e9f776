"""Checks the invariant of DESIGN.md against what really is in Redis: for tests, chaos, ``midsentence verify``. Writes nothing.

One walk over all keys (SCAN), in batches: what is held at once does not grow with the number of jobs. Nothing stops the service
meanwhile, so what looks wrong is read again before it is said.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Any

from storage import keys
from storage.batch_audit import BatchAudit
from storage.codec import engine_record, pairs
from storage.findings import Check, Finding, Severity
from storage.job_audit import (
    STANDING,
    SeenJob,
    damage,
    explain,
    idempotency_findings,
    log_finding,
    member_finding,
    owner_findings,
    parse_job,
    place_findings,
    places,
    read_log,
    short,
)
from storage.records import JobStatus
from storage.wire import Command, Wire, translate

Found = Iterator[tuple[str, Finding]]  #: which of the keys (or members) asked for, and what of it
Checker = Callable[[Sequence[str]], Found]

_BATCH = 100  #: jobs: their prompts are in memory together
_ENTRIES = 20_000  #: of logs, in memory together
LOOK_AGAIN = (0.02, 0.2, 0.5)  #: seconds before each
_LISTS_OF_JOBS = (keys.QUEUE, keys.INDEX, keys.TENANT_INDEX, keys.OWNED, keys.SERVED, keys.DEADLINES, keys.EXPIRY, keys.BATCH_JOBS)


def audit(url: str, *, timeout: float = 30.0) -> list[Finding]:
    """All that is wrong in a store that nobody writes to; empty when all is well."""
    wire = Wire(url, connections=1, timeout=timeout, client_name="midsentence-audit")
    try:
        return list(RedisAudit(wire, live=False).findings())
    finally:
        wire.close()


class RedisAudit:
    """``live``: others may write meanwhile. ``checked`` has the numbers of jobs, tokens and keys once ``findings`` was read."""

    def __init__(self, wire: Wire, *, live: bool, on_jobs: Callable[[int], None] = lambda _: None) -> None:
        self._wire = wire
        self._live = live
        self._on_jobs = on_jobs
        self.checked: Counter[str] = Counter(jobs=0, tokens=0, keys=0)

    def findings(self) -> Iterator[Finding]:
        """Raises StorageError where Redis does not answer."""
        batches = BatchAudit(self._read)
        yield from self._settled(self._counts, [keys.COUNTS])
        yield from self._settled(batches.counts, [keys.BATCH_COUNTS])
        checkers: dict[str, Checker] = {
            keys.JOB: self._jobs,
            keys.LOG: self._logs,
            keys.ENGINE: self._engines,
            keys.ENGINES: self._engine_ids,
            keys.APIS: self._apis,
            keys.SERVED: self._served,
            keys.POOL: self._pools,
            keys.IDEMPOTENCY: self._idempotency,
            **batches.checkers(),
        }
        for found in self._scan():
            self.checked["keys"] += len(found)
            yield from self._settled(self._keys, found)
            for kind, check in checkers.items():
                for batch in _batches((key for key in found if _kind(key) == kind), _BATCH):
                    yield from self._settled(check, batch)
                    if kind == keys.JOB:
                        self.checked["jobs"] += len(batch)
                        self._on_jobs(self.checked["jobs"])
            for key in found:
                if _kind(key) in _LISTS_OF_JOBS:
                    for members in self._scan_members(key):
                        yield from self._settled(partial(self._members, key), members)

    def _settled(self, check: Checker, batch: Sequence[str]) -> Iterator[Finding]:
        """What ``check`` finds, and finds again: a job may have moved on between two of its reads."""
        found = list(check(batch))
        for pause in LOOK_AGAIN if self._live else ():
            if not found:
                return
            time.sleep(pause)
            found = list(check(list(dict.fromkeys(subject for subject, _ in found))))
        yield from (finding for _, finding in found)

    def _scan(self) -> Iterator[list[str]]:
        cursor = "0"
        while True:
            cursor, found = self._wire.call("SCAN", cursor, "MATCH", keys.PREFIX + "*", "COUNT", "1000")
            yield found
            if cursor == "0":
                return

    def _scan_members(self, key: str) -> Iterator[list[str]]:
        scan, step = ("SSCAN", 1) if _is_set(key) else ("ZSCAN", 2)  # a sorted set's come with their scores
        cursor = "0"
        while reply := self._read([(scan, key, cursor, "COUNT", "1000")])[0]:
            cursor, found = reply
            yield found[::step]
            if cursor == "0":
                return

    def _read(self, commands: Sequence[Command]) -> list[Any]:
        """Replies; None for a key of the wrong type, which ``_keys`` reports."""
        replies = self._wire.exchange(commands) if commands else []
        for at, reply in enumerate(replies):
            if isinstance(reply, Exception):
                if not str(reply).startswith("WRONGTYPE"):
                    raise translate(reply) from reply
                replies[at] = None
        return replies

    # keys ------------------------------------------------------------------------------------------------------------
    def _keys(self, names: Sequence[str]) -> Found:
        replies = self._read([command for key in names for command in (("TYPE", key), ("PTTL", key))])
        for key, found, left in zip(names, replies[::2], replies[1::2], strict=True):
            wanted = keys.TYPES.get(_kind(key))
            if found == "none":
                continue  # gone since the scan
            if wanted is None:
                what = "is no key of this version: written by another one, or by hand"
                yield key, Finding(Severity.REPAIRABLE, Check.KEY, short(key), what, "remove it if nobody knows it")
            elif found != wanted:
                yield key, damage(Check.KEY, short(key), f"is a {found}, should be a {wanted}")
            if left != -1:
                yield key, damage(Check.KEY, short(key), f"has a time to live: gone in {left / 1000:.0f} s", f"PERSIST {key}")

    def _counts(self, _: Sequence[str]) -> Found:
        cards: list[Command] = [("ZCARD", keys.index(status, None)) for status in JobStatus]
        flat, *sizes = self._read([("HGETALL", keys.COUNTS), *cards])
        counts = pairs(flat or [])
        for status, size in zip(JobStatus, sizes, strict=True):
            if counts.get(status, "0") != str(size):
                what = f"{counts.get(status, 0)} jobs are counted as {status}, {size} are listed"
                yield keys.COUNTS, damage(Check.KEY, short(keys.COUNTS), what)

    def _logs(self, names: Sequence[str]) -> Found:
        for key, exists in self._beside(names, [("EXISTS", keys.job(key.removeprefix(keys.LOG))) for key in names]):
            if not exists:
                yield key, damage(Check.KEY, short(key), "is the log of a job that has no record")

    def _idempotency(self, names: Sequence[str]) -> Found:
        first = [(value or "").partition(" ")[0] for value in self._read([("GET", key) for key in names])]
        for key, digest in self._beside(names, [("HGET", keys.job(job_id), "idempotency") for job_id in first]):
            if digest != key.removeprefix(keys.IDEMPOTENCY):
                what = "names no job that was made with it: a request with this key makes a new one"
                yield key, Finding(Severity.REPAIRABLE, Check.KEY, short(key), what, f"UNLINK {key}")

    def _beside(self, names: Sequence[str], commands: Sequence[Command]) -> list[tuple[str, Any]]:
        """Each key with the reply to its command, but for keys that went away."""
        replies = self._read([each for key, command in zip(names, commands, strict=True) for each in (("EXISTS", key), command)])
        return [(key, reply) for key, exists, reply in zip(names, replies[::2], replies[1::2], strict=True) if exists]

    # engines ---------------------------------------------------------------------------------------------------------
    def _engines(self, names: Sequence[str]) -> Found:
        ids = [key.removeprefix(keys.ENGINE) for key in names]
        replies = self._read([c for i in ids for c in (("HGETALL", keys.engine(i)), ("SISMEMBER", keys.ENGINES, i))])
        for key, engine_id, flat, listed in zip(names, ids, replies[::2], replies[1::2], strict=True):
            try:
                engine_record(engine_id, pairs(flat or []), ())
            except (KeyError, ValueError) as error:
                yield key, damage(Check.ENGINE, engine_id, f"its record cannot be read: {explain(error)}")
            if not listed:
                yield key, damage(Check.ENGINE, engine_id, f"is not listed in {short(keys.ENGINES)}: nobody watches its beat")

    def _engine_ids(self, names: Sequence[str]) -> Found:
        ids = sorted(self._read([("SMEMBERS", keys.ENGINES)])[0] or ())
        for engine_id, exists in zip(ids, self._read([("EXISTS", keys.engine(i)) for i in ids]), strict=True):
            if not exists:
                yield names[0], damage(Check.ENGINE, engine_id, "is listed and has no record")

    def _apis(self, names: Sequence[str]) -> Found:
        apis = sorted(pairs(self._read([("HGETALL", keys.APIS)])[0] or []))
        for api, exists in zip(apis, self._read([("EXISTS", keys.served(api)) for api in apis]), strict=True):
            if not exists:
                yield names[0], damage(Check.KEY, short(names[0]), f"lists {api}, with which no job ends")

    def _served(self, names: Sequence[str]) -> Found:
        for key, beat in self._beside(names, [("HGET", keys.APIS, key.removeprefix(keys.SERVED)) for key in names]):
            if not (beat or "").isdecimal():
                yield key, damage(Check.KEY, short(key), f"its api is not listed in {short(keys.APIS)}: nobody watches its beat")

    def _pools(self, names: Sequence[str]) -> Found:
        ids = sorted(self._read([("SMEMBERS", keys.ENGINES)])[0] or ())
        known = {keys.pool(reply) for reply in self._read([("HGET", keys.engine(i), "pool_id") for i in ids]) if reply}
        for key, exists in self._beside(names, [("EXISTS", key) for key in names]):
            if exists and key not in known:
                what = "is the table of a pool that no engine has"
                yield key, Finding(Severity.REPAIRABLE, Check.POOL, short(key), what, f"UNLINK {key}")

    # jobs ------------------------------------------------------------------------------------------------------------
    def _jobs(self, names: Sequence[str]) -> Found:
        ids = [key.removeprefix(keys.JOB) for key in names]
        replies = self._read([c for i in ids for c in (("HGETALL", keys.job(i)), ("XLEN", keys.log(i)))])
        jobs: list[SeenJob] = []
        for job_id, flat, entries in zip(ids, replies[::2], replies[1::2], strict=True):
            if not flat:
                continue  # purged since the scan, or of the wrong type
            parsed = parse_job(job_id, pairs(flat), entries or 0)
            if isinstance(parsed, Finding):
                yield keys.job(job_id), parsed
            else:
                jobs.append(parsed)
        for finding_of in (self._standing, self._read_logs):
            yield from ((keys.job(job.job_id), finding) for job, finding in finding_of(jobs))

    def _standing(self, jobs: Sequence[SeenJob]) -> Iterator[tuple[SeenJob, Finding]]:
        """Owner, idempotency key, and every place of each job."""
        commands: list[Command] = []
        for job in jobs:
            commands.append(("HGET", keys.engine(job.record.engine_id), "incarnation"))
            commands.append(("GET", keys.IDEMPOTENCY + job.idempotency))
            commands += [_look_up(key, job.job_id) for key in places(job.standing)]
        replies = iter(self._read(commands))
        for job in jobs:
            incarnation, named = next(replies), next(replies)
            scores: dict[str, float | None] = {}
            for key in places(job.standing):
                found = next(replies)
                if _is_set(key):
                    scores |= {key: None} if found else {}
                elif found is not None:
                    scores[key] = float(found)
            yield from ((job, finding) for finding in owner_findings(job.record, incarnation))
            yield from ((job, finding) for finding in place_findings(job, scores))
            if job.idempotency:
                yield from ((job, finding) for finding in idempotency_findings(job, named))

    def _read_logs(self, jobs: Sequence[SeenJob]) -> Iterator[tuple[SeenJob, Finding]]:
        """To the end that each record tells, so many entries at a time. What is in a log never changes, so this needs no moment."""
        while unread := [job for job in jobs if job.unread]:
            parts, room = [], _ENTRIES
            for job in unread:
                if room:
                    parts.append((job, min(room, job.unread)))
                    room -= parts[-1][1]
            logs = self._read([_log_part(job, count) for job, count in parts])
            for (job, count), entries in zip(parts, logs, strict=True):
                read_log(job, entries or [], count)
        for job in jobs:
            self.checked["tokens"] += job.read
            if (finding := log_finding(job)) is not None:
                yield job, finding

    def _members(self, key: str, ids: Sequence[str]) -> Found:
        replies = self._read([c for i in ids for c in (_look_up(key, i), ("HMGET", keys.job(i), *STANDING))])
        for job_id, listed, values in zip(ids, replies[::2], replies[1::2], strict=True):
            still = bool(listed) if _is_set(key) else listed is not None
            finding = member_finding(key, job_id, dict(zip(STANDING, values or [None] * len(STANDING), strict=True)))
            if still and finding is not None:
                yield job_id, finding


def _kind(key: str) -> str:
    """The beginning in ``keys.TYPES`` that this key has; "" for a stranger. Some keys are a beginning and nothing else."""
    fits = [kind for kind in keys.TYPES if key == kind or (kind.endswith(":") and key.startswith(kind))]
    return max(fits, key=len, default="")


def _is_set(key: str) -> bool:
    return keys.TYPES[_kind(key)] == "set"


def _look_up(key: str, job_id: str) -> Command:
    return ("SISMEMBER" if _is_set(key) else "ZSCORE", key, job_id)


def _log_part(job: SeenJob, count: int) -> Command:
    return ("XRANGE", keys.log(job.job_id), f"{job.read + 1}-0", f"{job.read + count}-0")


def _batches(values: Iterable[str], size: int) -> Iterator[list[str]]:
    left = iter(values)
    while batch := list(islice(left, size)):
        yield batch
