"""Records of files and batches <-> hashes of Redis. Pure."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict

from storage.batch_records import BatchError, BatchOutput, BatchRecord, BatchStatus, FileRecord, NewBatch, NewFile


def file_fields(file: NewFile) -> dict[str, str]:
    """The script adds the rest."""
    return {"filename": file.filename, "purpose": file.purpose, "bytes": str(file.num_bytes), "sha256": file.sha256}


def file_record(file_id: str, fields: Mapping[str, str]) -> FileRecord | None:
    """None for one that was deleted and whose bytes a batch still needs."""
    if fields["deleted"] != "0":
        return None
    return file_of(file_id, fields)


def file_of(file_id: str, fields: Mapping[str, str]) -> FileRecord:
    return FileRecord(
        file_id=file_id,
        upload_id=fields["upload"],
        chunks=int(fields["chunks"]),
        num_bytes=int(fields["bytes"]),
        sha256=fields["sha256"],
        filename=fields["filename"],
        purpose=fields["purpose"],
        tenant=fields["tenant"],
        order=int(fields["order"]),
        created_at=float(fields["created_at"]),
    )


def batch_fields(batch: NewBatch) -> dict[str, str]:
    """The script adds the rest."""
    return {
        "line_prefix": batch.line_prefix,
        "endpoint": batch.endpoint,
        "request_hash": batch.request_hash,
        "metadata": "" if batch.metadata is None else json.dumps(batch.metadata),
        "request_id": batch.request_id,
        "traceparent": batch.traceparent,
    }


def batch_record(batch_id: str, fields: Mapping[str, str]) -> BatchRecord | None:
    """None for one that is being purged."""
    if fields["purged"]:
        return None
    reached = {status: float(fields[f"{status}_at"]) for status in BatchStatus if f"{status}_at" in fields}
    return BatchRecord(
        batch_id=batch_id,
        input_file_id=fields["input_file"],
        line_prefix=fields["line_prefix"],
        endpoint=fields["endpoint"],
        request_hash=fields["request_hash"],
        status=BatchStatus(fields["status"]),
        order=int(fields["order"]),
        created_at=float(fields["created_at"]),
        expires_at=float(fields["expires_at"]),
        tenant=fields["tenant"],
        metadata=json.loads(fields["metadata"]) if fields["metadata"] else None,
        request_id=fields["request_id"],
        traceparent=fields["traceparent"],
        total=int(fields["total"]),
        completed=int(fields["completed"]),
        failed=int(fields["failed"]),
        fed=int(fields["fed"]),
        position=int(fields["position"]),
        errors=_errors(fields["errors"]),
        reached=reached,
        deleted=frozenset(each for each in BatchOutput if f"{each}_deleted" in fields),
    )


def error_text(errors: Sequence[BatchError]) -> str:
    return json.dumps([asdict(error) for error in errors]) if errors else ""


def _errors(text: str) -> tuple[BatchError, ...]:
    return tuple(BatchError(**error) for error in json.loads(text)) if text else ()
