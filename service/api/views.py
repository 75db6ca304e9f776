"""Records as clients see them."""

from typing import Any

from service.api import logprobs
from service.api.problems import JobNotFound
from storage.job_spec import JobSpec
from storage.job_store import JobStore
from storage.records import JobRecord, LogEntry, LogRead

READ_LIMIT = 1000


def read_job(store: JobStore, job_id: str) -> tuple[JobRecord, list[LogEntry]]:
    """The record and exactly the tokens it counts. Raises JobNotFound and what ``storage.errors`` names."""
    entries: list[LogEntry] = []
    while True:
        found = store.read([LogRead(job_id, len(entries), READ_LIMIT)])[0]
        if found is None:
            raise JobNotFound(f"there is no job {job_id}")
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
        "metadata": spec.metadata,
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
