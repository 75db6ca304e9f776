"""Rules that both job stores keep in Python: checks of arguments, and the sums behind claims and sweeps. Pure."""

from collections.abc import Sequence
from dataclasses import replace

from storage.errors import StorageError
from storage.records import Commit, JobStatus, NewJob

POISON_STRIKES = 3
SUSPECT_STRIKES = 2  #: with so many a job takes its next step alone
POISON_MESSAGE = "the engine died three times before the job made progress, twice with the job running alone"
DEADLINE_MESSAGE = "the deadline passed before the job was finished"

#: Of the Lua scripts, for the in-memory store; tests hold the two against each other.
AFFINITY_GRACE = 30.0
RESERVE_AFTER = 30.0
CLAIM_SCAN = 128
CLAIM_CONSIDERED = 32
MOVED_PER_CALL = 64
READ_HOLD = 360.0
IDEMPOTENCY_HOLD = 86400.0
ENDED_PER_CALL = 64
EXPIRED_MESSAGE = "the completion window of its batch passed before the job was finished"

#: Seconds without a byte after which an upload is nobody's. One whose client lives gets 64 KiB in half a minute.
UPLOAD_IDLE = 3600.0


def check_group(jobs: Sequence[NewJob]) -> None:
    """ValueError for jobs that cannot be submitted together."""
    alike = [replace(job, job_id="", spec="", prompt_token_ids=()) for job in jobs]
    if not alike or alike.count(alike[0]) < len(jobs) or len({job.job_id for job in jobs}) < len(jobs):
        raise ValueError(
            "a group has at least one job; its jobs have ids of their own, may differ in spec and prompt, and in nothing else"
        )


def check_commit(commit: Commit) -> None:
    """ValueError for what no engine may ask: a bug of the caller, found before anything is sent."""
    if commit.finish is not None and not commit.finish.status.terminal:
        raise ValueError(f"a job cannot finish as {commit.finish.status}")
    if commit.finish is not None and commit.finish.status is JobStatus.FAILED and commit.finish.error is None:
        raise ValueError("a failed job needs an error")


def check_sweep(*, due: int, finished: int, limit: int) -> None:
    """A clock that jumped makes everything due at once. Fewer than one sweep's worth is never suspicious."""
    if due > limit and due * 10 > finished:
        raise StorageError(
            f"clock step? {due} of {finished} finished jobs are due for removal at once; nothing was removed",
            "compare the clock of the Redis machine; if it is right, lower the retention step by step",
        )


def parse_cursor(cursor: str) -> int:
    if not (cursor.isascii() and cursor.isdigit()):
        raise StorageError("the cursor is not one that this service gave out", "use next_cursor of the page before")
    return int(cursor)


def pages_needed(*, prompt: int, length: int, max_tokens: int, page_size: int, max_context: int) -> tuple[int, int]:
    """(pages to start with, pages it can come to need): a job never needs more than its last row."""
    total = -(-max(1, min(prompt + max_tokens, max_context) - 1) // page_size)
    return min(-(-(prompt + length) // page_size) + 1, total), total
