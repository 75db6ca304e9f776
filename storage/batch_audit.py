"""What must hold of files and batches in Redis: records, where they stand, and counts that are those of the jobs."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from storage import keys
from storage.batch_codec import batch_record, file_of
from storage.batch_records import MAX_CHOICES, BatchRecord, BatchStatus
from storage.codec import pairs
from storage.findings import Check, Finding, Severity
from storage.job_audit import damage, explain, short
from storage.records import JobStatus
from storage.wire import Command

Found = Iterator[tuple[str, Finding]]
Read = Callable[[Sequence[Command]], list[Any]]

_LINES = 1000  #: whose jobs are looked up together
_ANSWERED = (JobStatus.COMPLETED, JobStatus.INCOMPLETE)
#: Sorted sets of files and batches, and where the records of their members are.
_LISTS = {
    keys.FILES: keys.FILE, keys.FILE_EXPIRY: keys.FILE, keys.UPLOADS: keys.FILE_BYTES,
    keys.BATCHES: keys.BATCH, keys.LIVE_BATCHES: keys.BATCH, keys.BATCH_EXPIRY: keys.BATCH,
}  # fmt: skip


class BatchAudit:
    """``read``: many commands in one round trip; None for a key of the wrong type."""

    def __init__(self, read: Read) -> None:
        self._read = read

    def checkers(self) -> dict[str, Callable[[Sequence[str]], Found]]:
        """By kind of key. Each asks Redis anew, and names the key of what it found."""
        lists = dict.fromkeys(_LISTS, self._lists)
        return {keys.FILE: self._files, keys.FILE_BYTES: self._bytes, keys.BATCH: self._batches, **lists}

    def counts(self, _: Sequence[str]) -> Found:
        flat, live = self._read([("HGETALL", keys.BATCH_COUNTS), ("ZCARD", keys.LIVE_BATCHES)])
        counted = pairs(flat or [])
        number = sum(int(counted.get(status, "0")) for status in BatchStatus if not status.terminal)
        if number != live:
            what = f"{number} live batches are counted, {live} are listed"
            yield keys.BATCH_COUNTS, damage(Check.KEY, short(keys.BATCH_COUNTS), what)

    def _lists(self, names: Sequence[str]) -> Found:
        for key in names:
            prefix = next(record for begin, record in _LISTS.items() if key.startswith(begin))
            ids = self._read([("ZRANGE", key, "0", "-1")])[0] or []
            for member, exists in zip(ids, self._read([("EXISTS", prefix + i) for i in ids]), strict=True):
                if not exists:
                    yield key, damage(Check.KEY, short(key), f"lists {member}, which has no record")

    # files -----------------------------------------------------------------------------------------------------------
    def _files(self, names: Sequence[str]) -> Found:
        for key, flat in zip(names, self._read([("HGETALL", key) for key in names]), strict=True):
            if not flat:
                continue  # deleted since the scan
            file_id, fields = key.removeprefix(keys.FILE), pairs(flat)
            try:
                file, batches, deleted = file_of(file_id, fields), int(fields["batches"]), fields["deleted"] == "1"
            except (KeyError, ValueError) as error:
                yield key, damage(Check.BATCH, file_id, f"its record cannot be read: {explain(error)}")
                continue
            stored = keys.FILE_BYTES + file.upload_id
            held, num_bytes, of = self._read([("HLEN", stored), ("HGET", stored, "bytes"), ("HGET", stored, "file")])
            if (held, num_bytes, of) != (file.chunks + 2, str(file.num_bytes), file_id):
                yield (
                    key,
                    damage(Check.BATCH, file_id, f"its bytes are not the {file.num_bytes} in {file.chunks} chunks of its record"),
                )
            wanted = {keys.FILES + file.tenant: not deleted, keys.FILE_EXPIRY: not batches}
            yield from ((key, finding) for finding in self._standing(file_id, wanted))

    def _bytes(self, names: Sequence[str]) -> Found:
        for key, of in zip(names, self._read([("HGET", key, "file") for key in names]), strict=True):
            upload_id = key.removeprefix(keys.FILE_BYTES)
            waiting, owner, exists = self._read(
                [("ZSCORE", keys.UPLOADS, upload_id), ("HGET", f"{keys.FILE}{of}", "upload"), ("EXISTS", key)]
            )
            if exists and waiting is None and owner != upload_id:
                yield key, Finding(Severity.REPAIRABLE, Check.KEY, short(key), "are the bytes of no file", f"UNLINK {key}")

    # batches ---------------------------------------------------------------------------------------------------------
    def _batches(self, names: Sequence[str]) -> Found:
        for key, flat in zip(names, self._read([("HGETALL", key) for key in names]), strict=True):
            if not flat:
                continue
            batch_id, fields = key.removeprefix(keys.BATCH), pairs(flat)
            try:
                batch = batch_record(batch_id, {**fields, "purged": ""})
                assert batch is not None
            except (KeyError, ValueError) as error:
                yield key, damage(Check.BATCH, batch_id, f"its record cannot be read: {explain(error)}")
                continue
            live, purged = not batch.status.terminal, bool(fields["purged"])
            wanted = {keys.BATCHES + batch.tenant: not purged, keys.LIVE_BATCHES: live, keys.BATCH_EXPIRY: not live}
            found = [*self._standing(batch_id, wanted), *([] if purged else self._counted(batch))]
            yield from ((key, finding) for finding in found)

    def _standing(self, subject: str, wanted: Mapping[str, bool]) -> Iterator[Finding]:
        scores = self._read([("ZSCORE", key, subject) for key in wanted])
        for (key, listed), score in zip(wanted.items(), scores, strict=True):
            if listed != (score is not None):
                yield damage(Check.BATCH, subject, f"is {'not ' if listed else ''}listed in {short(key)}")

    def _counted(self, batch: BatchRecord) -> Iterator[Finding]:
        outcomes = Counter(self._outcomes(batch))
        completed, failed = outcomes["completed"], outcomes["failed"]
        if batch.status in (BatchStatus.CANCELLED, BatchStatus.EXPIRED):
            failed = batch.total - completed  # with the lines that never ran
        if (batch.completed, batch.failed) != (completed, failed):
            what = (
                f"{batch.completed} lines completed and {batch.failed} failed by its record, {completed} and {failed} by its jobs"
            )
            yield damage(Check.BATCH, batch.batch_id, what)
        if batch.status is BatchStatus.COMPLETED and completed + failed != batch.total:
            yield damage(Check.BATCH, batch.batch_id, f"is completed with {completed + failed} of {batch.total} lines")

    def _outcomes(self, batch: BatchRecord) -> Iterator[str]:
        for begin in range(1, batch.fed + 1, _LINES):
            ids = [batch.line_id(line) for line in range(begin, min(begin + _LINES, batch.fed + 1))]
            first = self._read([("HMGET", keys.JOB + i, "status", "choices") for i in ids])
            for job_id, (status, choices) in zip(ids, first, strict=True):
                others = [f"{job_id}-{i}" for i in range(1, int(choices or MAX_CHOICES))]  # unknown where the first was deleted
                yield _outcome([status, *self._read([("HGET", keys.JOB + i, "status") for i in others])])


def _outcome(statuses: Iterable[str | None]) -> str:
    known = [None if status is None else JobStatus(status) for status in statuses]
    if any(status is not None and not status.terminal for status in known):
        return "live"
    return "completed" if all(status in _ANSWERED for status in known) else "failed"
