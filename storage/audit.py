"""Checks the invariant of DESIGN.md against what really is in Redis: for tests, chaos, ``recover --verify``. Writes nothing."""

from collections.abc import Iterator
from typing import Any

from storage import chain, keys
from storage.codec import job_record, log_entry, pairs
from storage.records import JobRecord, JobStatus
from storage.wire import Wire


def audit(url: str, *, timeout: float = 30.0) -> list[str]:
    """What is wrong, in words; empty when all is well. Not atomic: run it when nothing writes."""
    wire = Wire(url, connections=1, timeout=timeout, client_name="midsentence-audit")
    try:
        return list(_problems(wire))
    finally:
        wire.close()


def _problems(wire: Wire) -> Iterator[str]:
    records: dict[str, JobRecord] = {}
    for job_id in wire.call("ZRANGE", keys.index("all", None), "0", "-1"):
        flat = wire.call("HGETALL", keys.job(job_id))
        if not flat:
            yield f"job {job_id} is listed but has no record"
            continue
        records[job_id] = job_record(job_id, pairs(flat))
        yield from _log_problems(wire, records[job_id])
    yield from _place_problems(wire, records)
    yield from _key_problems(wire, records)


def _log_problems(wire: Wire, record: JobRecord) -> Iterator[str]:
    name = f"job {record.job_id}"
    entries = wire.call("XRANGE", keys.log(record.job_id), "-", "+")
    ids = [entry_id for entry_id, _ in entries]
    if ids != [f"{i + 1}-0" for i in range(record.log_length)]:
        yield f"{name}: the log has {len(ids)} entries, the record says {record.log_length}, or numbers are missing"
    tokens = (log_entry(pairs(fields)).token for _, fields in entries)
    start = chain.start(record.spec, record.prompt_token_ids, record.job_id)
    if chain.extend_all(start, tokens) != record.chain:
        yield f"{name}: the chain hash of record and log do not fit"


def _place_problems(wire: Wire, records: dict[str, JobRecord]) -> Iterator[str]:
    """Every job stands exactly where its status says: queue, owner's set, expiry, indexes, counts."""
    engines = wire.call("SMEMBERS", keys.ENGINES)
    owned = {(engine, job_id) for engine in engines for job_id in wire.call("SMEMBERS", keys.owned(engine))}
    running = {(r.engine_id, r.job_id) for r in records.values() if r.status is JobStatus.IN_PROGRESS}
    yield from _difference("owner's list", owned, running)
    for model in {record.model_fingerprint for record in records.values()}:
        waiting = [r for r in records.values() if r.status is JobStatus.QUEUED and r.model_fingerprint == model]
        waiting.sort(key=lambda r: (-r.priority, r.order))
        queue = wire.call("ZRANGE", keys.queue(model), "0", "-1")
        if queue != [record.job_id for record in waiting]:
            yield f"the queue of model {model} is {queue}, by the records {[r.job_id for r in waiting]}"
    ended = {r.job_id for r in records.values() if r.status.terminal}
    yield from _difference("expiry", set(wire.call("ZRANGE", keys.EXPIRY, "0", "-1")), ended)
    dated = {r.job_id for r in records.values() if not r.status.terminal and r.deadline_at is not None}
    yield from _difference("deadlines", set(wire.call("ZRANGE", keys.DEADLINES, "0", "-1")), dated)
    counts = pairs(wire.call("HGETALL", keys.COUNTS))
    for status in JobStatus:
        here = {r.job_id for r in records.values() if r.status is status}
        yield from _difference(f"index of {status}", set(wire.call("ZRANGE", keys.index(status, None), "0", "-1")), here)
        if int(counts.get(status, "0")) != len(here):
            yield f"{counts.get(status)} jobs are counted as {status}, there are {len(here)}"


def _key_problems(wire: Wire, records: dict[str, JobRecord]) -> Iterator[str]:
    cursor = "0"
    while True:
        cursor, found = wire.call("SCAN", cursor, "MATCH", keys.PREFIX + "*", "COUNT", "1000")
        for key in found:
            if wire.call("PTTL", key) != -1:
                yield f"{key} has a time to live"
            for prefix in (keys.JOB, keys.LOG):
                if key.startswith(prefix) and key.removeprefix(prefix) not in records:
                    yield f"{key} belongs to no listed job"
            if key.startswith(keys.IDEMPOTENCY) and wire.call("GET", key).split()[0] not in records:
                yield f"{key} names a job that is not there"
        if cursor == "0":
            return


def _difference(what: str, found: set[Any], wanted: set[Any]) -> Iterator[str]:
    if found != wanted:
        yield f"{what}: too many {sorted(found - wanted)}, missing {sorted(wanted - found)}"
