"""``RedisBatchStore``: files and batches in Redis. Each verb is one script, as in ``storage.redis_store``."""

from collections.abc import Callable, Sequence
from typing import Any

from storage import keys
from storage.batch_codec import batch_fields, batch_record, error_text, file_fields, file_of, file_record
from storage.batch_records import (
    BatchError,
    BatchOutput,
    BatchPage,
    BatchRecord,
    BatchStatus,
    ChunkOutcome,
    CreatedBatch,
    CreatedFile,
    CreateOutcome,
    FedLine,
    FeedOutcome,
    FilePage,
    FileRecord,
    NewBatch,
    NewFile,
)
from storage.codec import group_arguments, pairs
from storage.rules import UPLOAD_IDLE, check_group, check_sweep
from storage.session import Call, Session


class RedisBatchStore:
    """``refuse_when_full`` raises StoreFull where memory is short: of uploads and lines, as of submits."""

    def __init__(self, session: Session, refuse_when_full: Callable[[], None]) -> None:
        self._session = session
        self._refuse_when_full = refuse_when_full

    # files -----------------------------------------------------------------------------------------------------------
    def put_chunk(self, upload_id: str, number: int, content: bytes, *, limit: int) -> ChunkOutcome:
        self._refuse_when_full()
        word = self._session.run("put_chunk", upload_id, str(number), str(limit), content)[0]
        return ChunkOutcome(word.lower())

    def create_file(self, file: NewFile, *, limit: int) -> CreatedFile:
        fields = _flat(file_fields(file))
        word, _, *rest = self._session.run(
            "create_file", file.file_id, file.upload_id, str(file.chunks), str(limit), file.tenant, *fields
        )
        return CreatedFile(CreateOutcome(word.lower()), file_record(file.file_id, pairs(rest[0])) if rest else None)

    def drop_upload(self, upload_id: str) -> bool:
        return bool(self._session.run("drop_upload", upload_id, "0")[0] == "OK")

    def file(self, file_id: str) -> FileRecord | None:
        flat = self._session.call("HGETALL", keys.FILE + file_id)
        return file_record(file_id, pairs(flat)) if flat else None

    def files(self, tenant: str, *, limit: int, before: int | None = None) -> FilePage:
        ids, more, records = self._page(keys.FILES + tenant, keys.FILE, limit, before)
        found = (file_record(i, pairs(flat)) for i, flat in zip(ids, records, strict=True) if flat)
        return FilePage(tuple(file for file in found if file is not None), more)

    def chunk(self, file: FileRecord, number: int) -> bytes | None:
        return self._session.read_bytes("HGET", keys.FILE_BYTES + file.upload_id, str(number))

    def delete_file(self, file_id: str) -> bool:
        return bool(self._session.run("delete_file", file_id)[0] == "OK")

    # batches ---------------------------------------------------------------------------------------------------------
    def create_batch(self, batch: NewBatch, *, limit: int) -> CreatedBatch:
        seconds, fields = repr(float(batch.window_seconds)), _flat(batch_fields(batch))
        word, _, *rest = self._session.run(
            "create_batch", batch.batch_id, batch.input_file_id, batch.tenant, str(limit), seconds, *fields
        )
        return CreatedBatch(CreateOutcome(word.lower()), batch_record(batch.batch_id, pairs(rest[0])) if rest else None)

    def batch(self, batch_id: str) -> BatchRecord | None:
        flat = self._session.call("HGETALL", keys.BATCH + batch_id)
        return batch_record(batch_id, pairs(flat)) if flat else None

    def input_file(self, batch_id: str) -> FileRecord | None:
        file_id = self._session.call("HGET", keys.BATCH + batch_id, "input_file")
        flat = self._session.call("HGETALL", keys.FILE + file_id) if file_id else None
        return file_of(file_id, pairs(flat)) if flat else None

    def batch_page(self, tenant: str, *, limit: int, before: int | None = None) -> BatchPage:
        ids, more, records = self._page(keys.BATCHES + tenant, keys.BATCH, limit, before)
        return BatchPage(tuple(_batches(ids, records)), more)

    def live_batches(self) -> list[BatchRecord]:
        ids = self._session.call("ZRANGE", keys.LIVE_BATCHES, "0", "-1")
        return _batches(ids, self._session.exchange([("HGETALL", keys.BATCH + i) for i in ids]))

    def counts(self) -> dict[BatchStatus, int]:
        counts = pairs(self._session.call("HGETALL", keys.BATCH_COUNTS))
        return {status: int(counts.get(status, "0")) for status in BatchStatus}

    def begin_batch(self, batch_id: str, total: int, errors: Sequence[BatchError]) -> BatchRecord | None:
        return _after(batch_id, self._session.run("begin_batch", batch_id, str(total), error_text(errors)))

    def feed(
        self, batch_id: str, lines: Sequence[FedLine], *, window: int, queue_limit: int, tenant_limit: int | None = None
    ) -> list[FeedOutcome]:
        self._refuse_when_full()
        limits = (str(window), str(queue_limit), "" if tenant_limit is None else str(tenant_limit))
        calls = []
        for line in lines:
            check_group(line.jobs)
            error = ("", "") if line.error is None else (line.error.code, line.error.message)
            calls.append(Call("feed", (batch_id, str(line.line), str(line.position), *limits, *error, *group_arguments(line.jobs))))
        answers = self._session.run_all(calls)
        return [FeedOutcome(answer[0].lower()) for answer in answers]

    def cancel_batch(self, batch_id: str) -> BatchRecord | None:
        return _after(batch_id, self._session.run("cancel_batch", batch_id))

    def advance_batch(self, batch_id: str) -> bool:
        return bool(self._session.run("advance_batch", batch_id)[0] == "OK")

    def delete_output(self, batch_id: str, which: BatchOutput) -> bool:
        return bool(self._session.run("delete_output", batch_id, which.value)[0] == "OK")

    def touch_batch(self, batch_id: str) -> None:
        self._session.run("touch_batch", batch_id)

    # sweeps ----------------------------------------------------------------------------------------------------------
    def sweep_files(self, retention_seconds: float, *, limit: int = 100) -> int:
        retention, idle = repr(float(retention_seconds)), repr(UPLOAD_IDLE)
        uploads = self._expired("uploads", idle, limit)
        files = self._expired("file_expiry", retention, limit)
        calls = [*(Call("drop_upload", (i, idle)) for i in uploads), *(Call("purge_file", (i, retention)) for i in files)]
        return sum(answer[0] == "OK" for answer in self._session.run_all(calls))

    def sweep_batches(self, retention_seconds: float, *, limit: int = 100) -> int:
        retention = repr(float(retention_seconds))
        for batch_id in self._expired("batch_expiry", retention, limit):
            answer = self._session.run("purge_batch", batch_id, retention, str(limit))
            if answer[0] in ("OK", "MORE"):
                return int(answer[2])
        return 0

    def _expired(self, which: str, seconds: str, limit: int) -> list[str]:
        _, _, due, ended, ids = self._session.run("expired", which, seconds, str(limit))
        check_sweep(due=due, finished=ended, limit=limit)
        return list(ids)

    def _page(self, index: str, prefix: str, limit: int, before: int | None) -> tuple[list[str], bool, list[Any]]:
        newest = "+inf" if before is None else f"({before}"
        ids = self._session.call("ZREVRANGEBYSCORE", index, newest, "-inf", "LIMIT", "0", str(limit + 1))
        page = ids[:limit]
        return page, len(ids) > limit, self._session.exchange([("HGETALL", prefix + i) for i in page])


def _flat(fields: dict[str, str]) -> list[str]:
    return [text for pair in fields.items() for text in pair]


def _batches(ids: Sequence[str], records: Sequence[Any]) -> list[BatchRecord]:
    found = (batch_record(i, pairs(flat)) for i, flat in zip(ids, records, strict=True) if flat)
    return [batch for batch in found if batch is not None]


def _after(batch_id: str, answer: Sequence[Any]) -> BatchRecord | None:
    return batch_record(batch_id, pairs(answer[2])) if len(answer) > 2 else None
