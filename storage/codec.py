"""Job records and log entries <-> strings of Redis. Pure."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from storage import chain
from storage.records import (
    EngineInfo,
    EngineRecord,
    JobError,
    JobRecord,
    JobStatus,
    LogEntry,
    NewJob,
    OwnedJob,
    PageEntry,
)

#: Fields that scripts change; a reader that knows the rest of a record asks for these alone (a prompt can be long).
MUTABLE = (
    "order", "created_at", "status", "engine", "incarnation", "fence", "strikes", "recoveries", "length", "chain",
    "arithmetic", "finish_reason", "error_code", "error_message", "cached", "replayed", "restored", "started_at",
    "finished_at", "metadata",
)  # fmt: skip


def pairs(flat: Sequence[str]) -> dict[str, str]:
    """``[field, value, ...]`` as HGETALL sends it."""
    return dict(zip(flat[::2], flat[1::2], strict=True))


def group_arguments(jobs: Sequence[NewJob]) -> Iterator[str]:
    """How many jobs and prompts; each prompt and its length, once, for it can be long; of each job id, spec, chain and the number
    of its prompt, from 1; then fields and values that their records share."""
    prompts = {prompt: number for number, prompt in enumerate(dict.fromkeys(job.prompt_token_ids for job in jobs), 1)}
    yield from (str(len(jobs)), str(len(prompts)))
    for prompt in prompts:
        yield from (" ".join(map(str, prompt)), str(len(prompt)))
    for job in jobs:
        start = chain.start(job.spec, job.prompt_token_ids, job.job_id)
        yield from (job.job_id, job.spec, start, str(prompts[job.prompt_token_ids]))
    for pair in _shared_fields(jobs[0]).items():
        yield from pair


def _shared_fields(job: NewJob) -> dict[str, str]:
    """With spec, chain and prompt every field of the record, so that no script meets a missing one. Scripts set times and order."""
    return {
        "model": job.model_fingerprint,
        "max_tokens": str(job.max_tokens),
        "request_hash": job.request_hash,
        "priority": str(job.priority),
        "tenant": job.tenant,
        "request_id": job.request_id,
        "traceparent": job.traceparent,
        "group": job.group,
        "served_by": job.served_by,
        **({"batch": job.batch, "choices": str(job.choices)} if job.batch else {}),
        **({"stored": "1"} if job.stored else {}),
        **dict.fromkeys(("fence", "strikes", "charged", "lost", "recoveries", "length", "cached", "replayed", "restored"), "0"),
        **dict.fromkeys(("engine", "incarnation", "arithmetic", "finish_reason", "error_code", "error_message"), ""),
        **dict.fromkeys(("started_at", "finished_at", "deadline_at", "affinity", "affinity_until", "unfit_since"), ""),
        **dict.fromkeys(("released_by", "orphan_of", "counted", "read_at"), ""),
    }


def job_record(job_id: str, fields: Mapping[str, str]) -> JobRecord:
    return JobRecord(
        job_id=job_id,
        spec=fields["spec"],
        prompt_token_ids=tuple(map(int, fields["prompt"].split())),
        model_fingerprint=fields["model"],
        max_tokens=int(fields["max_tokens"]),
        priority=int(fields["priority"]),
        tenant=fields["tenant"],
        deadline_at=_time(fields["deadline_at"]),
        request_id=fields["request_id"],
        traceparent=fields["traceparent"],
        group=fields["group"],
        served_by=fields["served_by"],
        batch=fields.get("batch", ""),  # a field of batches' jobs alone: others are as the first version wrote them
        choices=int(fields.get("choices", "1")),
        stored="stored" in fields,
        **_mutable(fields),
    )


def changed_record(record: JobRecord, fields: Mapping[str, str]) -> JobRecord:
    """The same job later. ``fields``: those of ``MUTABLE``."""
    return replace(record, **_mutable(fields))


def _mutable(fields: Mapping[str, str]) -> dict[str, Any]:
    code = fields["error_code"]
    return {
        "status": JobStatus(fields["status"]),
        "order": int(fields["order"]),
        "engine_id": fields["engine"],
        "incarnation": fields["incarnation"],
        "fence": int(fields["fence"]),
        "strikes": int(fields["strikes"]),
        "recoveries": int(fields["recoveries"]),
        "log_length": int(fields["length"]),
        "chain": fields["chain"],
        "arithmetic_fingerprint": fields["arithmetic"],
        "finish_reason": fields["finish_reason"],
        "error": JobError(code, fields["error_message"]) if code else None,
        "cached_tokens": int(fields["cached"]),
        "tokens_replayed": int(fields["replayed"]),
        "pages_restored": int(fields["restored"]),
        "created_at": float(fields["created_at"]),
        "started_at": _time(fields["started_at"]),
        "finished_at": _time(fields["finished_at"]),
        "metadata": fields.get("metadata") or "",
    }


def _time(value: str) -> float | None:
    return float(value) if value else None


def log_entry(fields: Mapping[str, str]) -> LogEntry:
    return LogEntry(int(fields["t"]), fields["x"], fields.get("l", ""))


def log_arguments(entries: Iterable[LogEntry]) -> Iterator[str]:
    for entry in entries:
        yield from (str(entry.token), entry.text, entry.logprobs)


def engine_fields(info: EngineInfo) -> dict[str, str]:
    return {
        "boot_id": info.boot_id,
        "host": info.host,
        "pid": str(info.pid),
        "pool_id": info.pool_id,
        "model": info.model_fingerprint,
        "model_name": info.model_name,
        "page_size": str(info.page_size),
        "device_pages": str(info.device_pages),
        "max_context": str(info.max_context),
        "prefill_chunk": str(info.prefill_chunk),
        "arithmetic": info.arithmetic_fingerprint,
    }


def engine_record(engine_id: str, fields: Mapping[str, str], job_ids: Iterable[str]) -> EngineRecord:
    info = EngineInfo(
        engine_id=engine_id,
        boot_id=fields["boot_id"],
        host=fields["host"],
        pid=int(fields["pid"]),
        pool_id=fields["pool_id"],
        model_fingerprint=fields["model"],
        model_name=fields["model_name"],
        page_size=int(fields["page_size"]),
        device_pages=int(fields["device_pages"]),
        max_context=int(fields["max_context"]),
        prefill_chunk=int(fields["prefill_chunk"]),
        arithmetic_fingerprint=fields["arithmetic"],
    )
    return EngineRecord(info, fields["incarnation"], int(fields["beat"]), fields["dead"] == "1", tuple(sorted(job_ids)))


def owned_jobs(tokens: Iterable[Sequence[str]]) -> tuple[OwnedJob, ...]:
    return tuple(OwnedJob(job_id, int(fence), int(strikes)) for job_id, fence, strikes in tokens)


def page_text(entry: PageEntry) -> str:
    return f"{entry.identity} {entry.checksum}"


def page_entry(text: str, now: float = 0.0) -> PageEntry:
    """As ``publish.lua`` writes it; ``now``: the store's time. ValueError for anything else."""
    identity, checksum, *published_at = text.split(" ", 2)
    return PageEntry(identity, int(checksum), max(0.0, now - float(published_at[0])) if published_at else 0.0)
