"""``MemoryBatchStore``: files and batches without Redis; the reasons for the rules stand in ``lua/``."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace

from storage.batch_records import (
    MAX_CHOICES,
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
from storage.memory_state import Batch, File, State, Upload, choice_id
from storage.memory_verbs import create_group, no_room, remove_job
from storage.records import JobError, JobStatus
from storage.rules import ENDED_PER_CALL, EXPIRED_MESSAGE, READ_HOLD, UPLOAD_IDLE, check_group, check_sweep

_OPEN = (BatchStatus.VALIDATING, BatchStatus.IN_PROGRESS)


class MemoryBatchStore:
    """``script``: the store's lock and its state, as ``MemoryJobStore`` takes it for each call."""

    def __init__(self, script: Callable[[], AbstractContextManager[State]]) -> None:
        self._script = script

    # files -----------------------------------------------------------------------------------------------------------
    def put_chunk(self, upload_id: str, number: int, content: bytes, *, limit: int) -> ChunkOutcome:
        with self._script() as state:
            upload = state.uploads.get(upload_id, Upload())
            if upload.is_file:
                return ChunkOutcome.CLOSED
            more = len(content) - len(upload.chunks.get(number, b""))
            if sum(each.num_bytes for each in state.uploads.values()) + more > limit:
                return ChunkOutcome.FULL
            upload.chunks[number] = content
            upload.at = state.now
            state.uploads[upload_id] = upload
            state.commit += 1
            return ChunkOutcome.OK

    def create_file(self, file: NewFile, *, limit: int) -> CreatedFile:
        with self._script() as state:
            if file.file_id in state.files:
                return CreatedFile(CreateOutcome.EXISTS, _seen_file(state, file.file_id))
            upload = state.uploads.get(file.upload_id)
            if upload is None or len(upload.chunks) != file.chunks:
                return CreatedFile(CreateOutcome.INCOMPLETE)
            if len(_files_of(state, file.tenant)) >= limit:
                return CreatedFile(CreateOutcome.FULL)
            state.order += 1
            record = FileRecord(
                file.file_id, file.upload_id, file.chunks, file.num_bytes, file.sha256, file.filename, file.purpose, file.tenant,
                state.order, state.now,
            )  # fmt: skip
            state.files[file.file_id] = File(record, expires=state.now)
            upload.is_file = True
            state.commit += 1
            return CreatedFile(CreateOutcome.CREATED, record)

    def drop_upload(self, upload_id: str) -> bool:
        with self._script() as state:
            return _drop_upload(state, upload_id, 0.0)

    def file(self, file_id: str) -> FileRecord | None:
        with self._script() as state:
            return _seen_file(state, file_id)

    def files(self, tenant: str, *, limit: int, before: int | None = None) -> FilePage:
        with self._script() as state:
            found = [record for record in _files_of(state, tenant) if before is None or record.order < before]
            found.sort(key=lambda record: -record.order)
            return FilePage(tuple(found[:limit]), len(found) > limit)

    def chunk(self, file: FileRecord, number: int) -> bytes | None:
        with self._script() as state:
            upload = state.uploads.get(file.upload_id)
            return None if upload is None else upload.chunks.get(number)

    def delete_file(self, file_id: str) -> bool:
        with self._script() as state:
            file = state.files.get(file_id)
            if file is None or file.deleted:
                return False
            if file.batches:
                file.deleted = True
            else:
                _remove_file(state, file)
            state.commit += 1
            return True

    # batches ---------------------------------------------------------------------------------------------------------
    def create_batch(self, batch: NewBatch, *, limit: int) -> CreatedBatch:
        with self._script() as state:
            if batch.batch_id in state.batches:
                return CreatedBatch(CreateOutcome.EXISTS, _seen_batch(state, batch.batch_id))
            file = state.files.get(batch.input_file_id)
            if file is None or file.deleted or file.record.tenant != batch.tenant:
                return CreatedBatch(CreateOutcome.NO_FILE)
            if len(_live(state)) >= limit:
                return CreatedBatch(CreateOutcome.FULL)
            state.order += 1
            record = BatchRecord(
                batch_id=batch.batch_id,
                input_file_id=batch.input_file_id,
                line_prefix=batch.line_prefix,
                endpoint=batch.endpoint,
                request_hash=batch.request_hash,
                status=BatchStatus.VALIDATING,
                order=state.order,
                created_at=state.now,
                expires_at=state.now + batch.window_seconds,
                tenant=batch.tenant,
                metadata=batch.metadata,
                request_id=batch.request_id,
                traceparent=batch.traceparent,
            )
            state.batches[batch.batch_id] = Batch(record)
            file.batches += 1
            file.expires = None
            state.commit += 1
            return CreatedBatch(CreateOutcome.CREATED, record)

    def batch(self, batch_id: str) -> BatchRecord | None:
        with self._script() as state:
            return _seen_batch(state, batch_id)

    def input_file(self, batch_id: str) -> FileRecord | None:
        with self._script() as state:
            batch = state.batches.get(batch_id)
            file = state.files.get(batch.record.input_file_id) if batch is not None else None
            return None if file is None else file.record

    def batch_page(self, tenant: str, *, limit: int, before: int | None = None) -> BatchPage:
        with self._script() as state:
            seen = (batch.record for batch in state.batches.values() if batch.purged is None and batch.record.tenant == tenant)
            found = sorted((record for record in seen if before is None or record.order < before), key=lambda r: -r.order)
            return BatchPage(tuple(found[:limit]), len(found) > limit)

    def live_batches(self) -> list[BatchRecord]:
        with self._script() as state:
            return sorted(_live(state), key=lambda record: record.order)

    def counts(self) -> dict[BatchStatus, int]:
        with self._script() as state:
            statuses = [batch.record.status for batch in state.batches.values() if batch.purged is None]
            return {status: statuses.count(status) for status in BatchStatus}

    def begin_batch(self, batch_id: str, total: int, errors: Sequence[BatchError]) -> BatchRecord | None:
        with self._script() as state:
            batch = state.batches.get(batch_id)
            if batch is not None and batch.record.status is BatchStatus.VALIDATING:
                status = BatchStatus.FAILED if errors else BatchStatus.IN_PROGRESS
                batch.change(state.now, status=status, total=total, errors=tuple(errors))
                state.commit += 1
            return _seen_batch(state, batch_id)

    def feed(
        self, batch_id: str, lines: Sequence[FedLine], *, window: int, queue_limit: int, tenant_limit: int | None = None
    ) -> list[FeedOutcome]:
        answers = []
        for line in lines:
            check_group(line.jobs)
            with self._script() as state:
                answers.append(_feed(state, batch_id, line, window, queue_limit, tenant_limit))
        return answers

    def cancel_batch(self, batch_id: str) -> BatchRecord | None:
        with self._script() as state:
            batch = state.batches.get(batch_id)
            if batch is not None and batch.record.status in _OPEN:
                batch.change(state.now, status=BatchStatus.CANCELLING)
                state.commit += 1
            return _seen_batch(state, batch_id)

    def advance_batch(self, batch_id: str) -> bool:
        with self._script() as state:
            batch = state.batches.get(batch_id)
            if batch is None or batch.record.status.terminal:
                return False
            if batch.record.status in _OPEN:
                if batch.record.expires_at > state.now:
                    return False
                batch.change(state.now, status=BatchStatus.FINALIZING)
            _end_some(state, batch)
            state.commit += 1
            return True

    def delete_output(self, batch_id: str, which: BatchOutput) -> bool:
        with self._script() as state:
            batch = state.batches.get(batch_id)
            if batch is None or batch.purged is not None or which in batch.record.deleted:
                return False
            batch.record = replace(batch.record, deleted=batch.record.deleted | {which})
            state.commit += 1
            return True

    def touch_batch(self, batch_id: str) -> None:
        with self._script() as state:
            if batch_id in state.batches:
                state.batches[batch_id].read_at = state.now

    # sweeps ----------------------------------------------------------------------------------------------------------
    def sweep_files(self, retention_seconds: float, *, limit: int = 100) -> int:
        with self._script() as state:
            dates = {upload_id: upload.at for upload_id, upload in state.uploads.items() if not upload.is_file}
            removed = sum(_drop_upload(state, upload_id, UPLOAD_IDLE) for upload_id in _due(state, dates, UPLOAD_IDLE, limit))
            files = {file_id: file.expires for file_id, file in state.files.items() if file.expires is not None}
            for file_id in _due(state, files, retention_seconds, limit):
                _remove_file(state, state.files[file_id])
                state.commit += 1
                removed += 1
            return removed

    def sweep_batches(self, retention_seconds: float, *, limit: int = 100) -> int:
        with self._script() as state:
            ended = {batch_id: batch.ended_at for batch_id, batch in state.batches.items() if batch.record.status.terminal}
            for batch_id in _due(state, ended, retention_seconds, limit):
                batch = state.batches[batch_id]
                hold = 0.0 if batch.read_at is None else batch.read_at + READ_HOLD
                if batch.purged is None and hold > state.now:
                    batch.ended_at = hold - retention_seconds
                    continue
                state.commit += 1
                return _purge_some(state, batch, limit)
            return 0


def _seen_file(state: State, file_id: str) -> FileRecord | None:
    file = state.files.get(file_id)
    return None if file is None or file.deleted else file.record


def _seen_batch(state: State, batch_id: str) -> BatchRecord | None:
    batch = state.batches.get(batch_id)
    return None if batch is None or batch.purged is not None else batch.record


def _files_of(state: State, tenant: str) -> list[FileRecord]:
    return [file.record for file in state.files.values() if not file.deleted and file.record.tenant == tenant]


def _live(state: State) -> list[BatchRecord]:
    return [batch.record for batch in state.batches.values() if not batch.record.status.terminal]


def _feed(state: State, batch_id: str, line: FedLine, window: int, queue_limit: int, tenant_limit: int | None) -> FeedOutcome:
    batch = state.batches.get(batch_id)
    if batch is None:
        return FeedOutcome.GONE
    record = batch.record
    if record.fed >= line.line:
        return FeedOutcome.PASSED
    if record.status is not BatchStatus.IN_PROGRESS:
        return FeedOutcome.CLOSED
    if record.fed + 1 != line.line:
        return FeedOutcome.GAP
    if record.live_lines >= window:
        return FeedOutcome.AHEAD
    refused = no_room(state, line.jobs, queue_limit, tenant_limit) if line.error is None else None
    if refused is not None:
        return FeedOutcome(refused.value)
    batch.change(state.now, fed=line.line, position=line.position)
    create_group(state, line.jobs)
    if line.error is not None:
        for job in line.jobs:
            state.end(state.jobs[job.job_id], JobStatus.FAILED, error=line.error)
    state.commit += 1
    return FeedOutcome.OK


def _end_some(state: State, batch: Batch) -> None:
    cancelling = batch.record.status is BatchStatus.CANCELLING
    live = sorted(
        job.record.job_id
        for job in state.jobs.values()
        if job.record.batch == batch.record.batch_id and not job.record.status.terminal
    )
    for job_id in live[:ENDED_PER_CALL]:
        if cancelling:
            state.end(state.jobs[job_id], JobStatus.CANCELLED)
        else:
            state.end(state.jobs[job_id], JobStatus.FAILED, error=JobError("batch_expired", EXPIRED_MESSAGE))
    if len(live) <= ENDED_PER_CALL:
        status = BatchStatus.CANCELLED if cancelling else BatchStatus.EXPIRED
        batch.change(state.now, status=status, failed=batch.record.total - batch.record.completed)


def _purge_some(state: State, batch: Batch, limit: int) -> int:
    line, removed = batch.purged or 0, 0
    while line < batch.record.fed and removed < limit:
        line += 1
        first = state.jobs.get(batch.record.line_id(line))
        for i in range(MAX_CHOICES if first is None else first.record.choices):
            job = state.jobs.get(choice_id(batch.record.line_id(line), i))
            if job is not None:
                remove_job(state, job)
                removed += 1
    batch.purged = line
    if line == batch.record.fed:
        del state.batches[batch.record.batch_id]
        file = state.files[batch.record.input_file_id]
        file.batches -= 1
        if not file.batches:
            _remove_file(state, file)
    return removed


def _due(state: State, dates: dict[str, float], seconds: float, limit: int) -> list[str]:
    due = sorted((at, subject) for subject, at in dates.items() if at <= state.now - seconds)
    check_sweep(due=len(due), finished=len(dates), limit=limit)
    return [subject for _, subject in due[:limit]]


def _drop_upload(state: State, upload_id: str, idle: float) -> bool:
    upload = state.uploads.get(upload_id)
    if upload is None or upload.is_file or upload.at > state.now - idle:
        return False
    del state.uploads[upload_id]
    state.purges += 1
    state.commit += 1
    return True


def _remove_file(state: State, file: File) -> None:
    del state.files[file.record.file_id]
    del state.uploads[file.record.upload_id]
    state.purges += 1
