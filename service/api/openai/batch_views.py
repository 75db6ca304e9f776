"""Files and batches as OpenAI shows them. A batch's output and error files are views of its jobs, made anew at each read."""

import json
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

from service.api.context import Context
from service.api.openai.batch_lines import CUSTOM_ID, LineRefused, parse_line, read_lines, request_id
from service.api.openai.file_ids import view_id
from service.api.openai.surface import Output, Surface
from service.api.problems import ApiError, openai_body, problem_of
from service.api.views import READ_LIMIT
from storage.batch_records import MAX_CHOICES, BatchOutput, BatchRecord, BatchStatus, FileRecord
from storage.job_spec import JobSpec
from storage.job_store import JobStore
from storage.records import JobRecord, JobStatus, LogRead, LogSlice

_ANSWERED = (JobStatus.COMPLETED, JobStatus.INCOMPLETE)
_TOUCH_EVERY = 60.0
_TOGETHER = 16  #: lines whose jobs are read in one round trip
#: Why a line has no answer, by how its batch ended.
_NEVER_RAN = {
    BatchStatus.EXPIRED: {"code": "batch_expired", "message": "the completion window passed before this request was done"},
    BatchStatus.CANCELLED: {"code": "batch_cancelled", "message": "the batch was cancelled before this request was done"},
}
_DELETED = {"code": "job_deleted", "message": "the answer to this request was deleted"}


def file_object(file: FileRecord, retention_seconds: float) -> dict[str, Any]:
    return {
        "id": file.file_id,
        "object": "file",
        "bytes": file.num_bytes,
        "created_at": int(file.created_at),
        "expires_at": int(file.created_at + retention_seconds),
        "filename": file.filename,
        "purpose": file.purpose,
        "status": "processed",
    }


def view_object(batch: BatchRecord, kind: BatchOutput, num_bytes: int, retention_seconds: float) -> dict[str, Any]:
    ended = int(batch.reached[batch.status])
    return {
        "id": view_id(kind, batch.batch_id),
        "object": "file",
        "bytes": num_bytes,
        "created_at": ended,
        "expires_at": int(ended + retention_seconds),
        "filename": f"{batch.batch_id}_{kind}.jsonl",
        "purpose": "batch_output",
        "status": "processed",
    }


def has_view(batch: BatchRecord, kind: BatchOutput) -> bool:
    """As of OpenAI's: once the batch has ended, and where there is a line in it."""
    if not batch.status.terminal or batch.status is BatchStatus.FAILED:
        return False
    return (batch.completed if kind is BatchOutput.OUTPUT else batch.failed) > 0


def batch_object(batch: BatchRecord, model: str) -> dict[str, Any]:
    errors = [{"code": e.code, "line": e.line, "message": e.message, "param": e.param} for e in batch.errors]
    reached = {f"{status}_at": batch.reached.get(status) for status in BatchStatus if status is not BatchStatus.VALIDATING}
    return {
        "id": batch.batch_id,
        "object": "batch",
        "endpoint": batch.endpoint,
        "model": model,
        "errors": {"object": "list", "data": errors} if errors else None,
        "input_file_id": batch.input_file_id,
        "completion_window": "24h",
        "status": batch.status.value,
        "output_file_id": view_id(BatchOutput.OUTPUT, batch.batch_id) if has_view(batch, BatchOutput.OUTPUT) else None,
        "error_file_id": view_id(BatchOutput.ERROR, batch.batch_id) if has_view(batch, BatchOutput.ERROR) else None,
        "created_at": int(batch.created_at),
        "expires_at": int(batch.expires_at),
        **{name: None if at is None else int(at) for name, at in reached.items()},
        "request_counts": {"total": batch.total, "completed": batch.completed, "failed": batch.failed},
        "metadata": batch.metadata,
    }


class BatchView:
    """The lines of an ended batch's output or error file, in the order of its input: a few of them are in memory at a time."""

    def __init__(self, context: Context, surface: Surface, batch: BatchRecord, kind: BatchOutput) -> None:
        self._context = context
        self._surface = surface
        self._batch = batch
        self._kind = kind

    async def lines(self) -> AsyncIterator[bytes]:
        """Raises what ``storage.errors`` names."""
        batch, touched = self._batch, 0.0
        for begin in range(1, batch.fed + 1, _TOGETHER):
            if time.monotonic() - touched >= _TOUCH_EVERY:
                touched = time.monotonic()
                await self._context.store.run(lambda store: store.batches.touch_batch(batch.batch_id))
            lines = range(begin, min(begin + _TOGETHER, batch.fed + 1))
            pages = await self._context.store.run(lambda store, lines=lines: _outputs(store, batch, lines))  # type: ignore[misc]
            for line, outputs in zip(lines, pages, strict=True):
                if (rendered := self._line(line, outputs)) is not None:
                    yield rendered
        if self._kind is BatchOutput.ERROR and batch.fed < batch.total:
            async for rendered in self._never_fed():
                yield rendered

    def _line(self, line: int, outputs: Sequence[Output]) -> bytes | None:
        answered = bool(outputs) and all(output.record.status in _ANSWERED for output in outputs)
        if answered != (self._kind is BatchOutput.OUTPUT):
            return None
        if not outputs:
            return self._rendered(line, str(line), error=_DELETED)
        records = [output.record for output in outputs]
        custom_id = str(JobSpec.from_json(records[0].spec).request[CUSTOM_ID])
        if any(_ended_with_its_batch(self._batch, record) for record in records):
            return self._rendered(line, custom_id, error=_NEVER_RAN[self._batch.status])
        if len(records) < records[0].choices:
            return self._rendered(line, custom_id, error=_DELETED)
        try:
            status, body = 200, self._surface.answer(outputs)
        except ApiError as error:
            status, body = problem_of(error).status, openai_body(error)
        response = {"status_code": status, "request_id": records[0].request_id, "body": body}
        return self._rendered(line, custom_id, response=response)

    async def _never_fed(self) -> AsyncIterator[bytes]:
        batch = self._batch
        file = await self._context.store.run(lambda store: store.batches.input_file(batch.batch_id))
        if file is None:
            return
        async for line in read_lines(self._context, file, batch.fed + 1, batch.position):
            try:
                custom_id = parse_line(line, batch.endpoint).custom_id
            except LineRefused:
                custom_id = str(line.number)
            yield self._rendered(line.number, custom_id, error=_NEVER_RAN[batch.status])

    def _rendered(
        self, line: int, custom_id: str, *, response: dict[str, Any] | None = None, error: dict[str, str] | None = None
    ) -> bytes:
        shown = {"id": request_id(self._batch, line), "custom_id": custom_id, "response": response, "error": error}
        return json.dumps(shown, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"


def _ended_with_its_batch(batch: BatchRecord, record: JobRecord) -> bool:
    if batch.status is BatchStatus.CANCELLED:
        return record.status is JobStatus.CANCELLED
    return batch.status is BatchStatus.EXPIRED and record.error is not None and record.error.code == "batch_expired"


def _outputs(store: JobStore, batch: BatchRecord, lines: range) -> list[list[Output]]:
    """Of each line's jobs that are there."""
    ids = [batch.line_id(line) for line in lines]
    found = store.read([LogRead(job_id, 0, READ_LIMIT) for job_id in ids])
    return [_outputs_of(store, job_id, first) for job_id, first in zip(ids, found, strict=True)]


def _outputs_of(store: JobStore, job_id: str, first: LogSlice | None) -> list[Output]:
    choices = MAX_CHOICES if first is None else first.record.choices
    others = [f"{job_id}-{i}" for i in range(1, choices)]
    slices = [first, *(store.read([LogRead(each, 0, READ_LIMIT) for each in others]) if others else ())]
    return [_whole(store, piece) for piece in slices if piece is not None]


def _whole(store: JobStore, piece: LogSlice) -> Output:
    entries = list(piece.entries)
    while len(piece.entries) == READ_LIMIT:
        more = store.read([LogRead(piece.record.job_id, len(entries), READ_LIMIT)])[0]
        if more is None:
            break
        piece = more
        entries += piece.entries
    return Output(piece.record, tuple(entries))
