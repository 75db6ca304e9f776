"""Ids of files and batches. With an Idempotency-Key they are a function of it, so that the same request finds what it made."""

import hashlib
import re
import secrets

from service.api.problems import BatchNotFound, FileNotFound
from storage.batch_records import BatchOutput

FILE_PREFIX, BATCH_PREFIX = "file-", "batch_"
_FILE_ID = re.compile(r"file-[0-9a-f]{32}")
_VIEW_ID = re.compile(r"file-(output|error)-([0-9a-f]{32})")
_BATCH_ID = re.compile(r"batch_[0-9a-f]{32}")


def new_id(prefix: str, tenant: str, key: str | None) -> str:
    """The record lives at least as long as the retention time, and the key with it."""
    if key is None:
        return prefix + secrets.token_hex(16)
    text = f"{prefix}{len(tenant)}:{tenant}{key}".encode("utf-8", "surrogatepass")
    return prefix + hashlib.blake2b(text, digest_size=16).hexdigest()


def line_prefix(batch_id: str, job_prefix: str) -> str:
    """With the number of a line behind it, the id of the line's first job."""
    return f"{job_prefix}{batch_id.removeprefix(BATCH_PREFIX)}-"


def view_id(kind: BatchOutput, batch_id: str) -> str:
    """The id of a batch's output or error file."""
    return f"file-{kind}-{batch_id.removeprefix(BATCH_PREFIX)}"


def batch_of_view(file_id: str) -> tuple[BatchOutput, str] | None:
    """(kind, batch id) for the id of such a file."""
    found = _VIEW_ID.fullmatch(file_id)
    return (BatchOutput(found[1]), BATCH_PREFIX + found[2]) if found else None


def checked_file_id(file_id: str) -> str:
    if not _FILE_ID.fullmatch(file_id) and not _VIEW_ID.fullmatch(file_id):
        raise FileNotFound("there is no such file: this is not a file id")
    return file_id


def checked_batch_id(batch_id: str) -> str:
    if not _BATCH_ID.fullmatch(batch_id):
        raise BatchNotFound("there is no such batch: this is not a batch id")
    return batch_id
