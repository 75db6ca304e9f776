"""Records as clients see them."""

import json
from typing import Any

from service.api import logprobs
from service.api.problems import JobNotFound
from storage.job_spec import JobSpec
from storage.job_store import JobStore
from storage.records import JobRecord, LogEntry, LogRead, LogSlice

READ_LIMIT = 1000


def of_tenant(found: LogSlice | None, job_id: str, tenant: str) -> LogSlice:
    """What was read, for its own tenant. Another tenant's job is answered as one that never was. Raises JobNotFound."""
    if found is None or found.record.tenant != tenant:
        raise JobNotFound(f"there is no job {job_id}")
    return found


def cancel_job(store: JobStore, job_id: str, tenant: str) -> None:
    """Raises JobNotFound and what ``storage.errors`` names. A job never changes its tenant: nothing can come between the two."""
    of_tenant(store.read([LogRead(job_id, 0, 1)])[0], job_id, tenant)
    store.cancel(job_id)


def read_job(store: JobStore, job_id: str, tenant: str) -> tuple[JobRecord, list[LogEntry]]:
    """The record and exactly the tokens it counts. Raises JobNotFound and what ``storage.errors`` names."""
    entries: list[LogEntry] = []
    while True:
        found = of_tenant(store.read([LogRead(job_id, len(entries), READ_LIMIT)])[0], job_id, tenant)
        entries += found.entries
        if len(found.entries) < READ_LIMIT or len(entries) >= found.record.log_length:
            return found.record, entries[: found.record.log_length]


def usage(record: JobRecord) -> dict[str, int]:
    return {
        "prompt_tokens": len(record.prompt_token_ids),
        "completion_tokens": record.log_length,
        "total_tokens": len(record.prompt_token_ids) + record.log_length,
        "cached_tokens": record.cached_tokens,
    }


def error(record: JobRecord) -> dict[str, str] | None:
    return {"code": record.error.code, "message": record.error.message} if record.error is not None else None


def metadata(record: JobRecord) -> dict[str, str]:
    """What the job was made with, or was given since."""
    given: dict[str, str] = json.loads(record.metadata) if record.metadata else JobSpec.from_json(record.spec).metadata
    return given


def asked_logprobs(record: JobRecord) -> bool:
    return JobSpec.from_json(record.spec).logprobs is not None


def recovery(record: JobRecord) -> dict[str, int]:
    return {
        "count": record.recoveries,
        "tokens_replayed": record.tokens_replayed,
        "pages_restored": record.pages_restored,
    }


def job(record: JobRecord, entries: list[LogEntry] | None) -> dict[str, Any]:
    """``entries`` None, in lists: without ``output``."""
    spec = JobSpec.from_json(record.spec)
    shown: dict[str, Any] = {
        "id": record.job_id,
        "object": "job",
        "status": record.status.value,
        "model": spec.model,
        "usage": usage(record),
        "error": error(record),
        "recovery": recovery(record),
        "created_at": record.created_at,
        "started_at": record.started_at,
        "finished_at": record.finished_at,
        "deadline_at": record.deadline_at,
        "priority": record.priority,
        "metadata": metadata(record),
        "request_id": record.request_id,
        "group": record.group or None,
    }
    if entries is not None:
        shown["output"] = _output(record, spec, entries)
    return shown


def _output(record: JobRecord, spec: JobSpec, entries: list[LogEntry]) -> dict[str, Any]:
    shown: dict[str, Any] = {
        "text": "".join(entry.text for entry in entries),
        "token_ids": [entry.token for entry in entries],
        "finish_reason": record.finish_reason or None,
    }
    if spec.logprobs is not None:
        shown["logprobs"] = [logprobs.native(entry) for entry in entries]
    return shown
