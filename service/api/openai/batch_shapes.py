"""What clients get of files and batches, as models for the OpenAPI document (see ``service.api.shapes``)."""

from typing import Literal

from pydantic import BaseModel, ConfigDict

from storage.batch_records import BatchStatus


class _Shape(BaseModel):
    model_config = ConfigDict(extra="forbid")


class File(_Shape):
    id: str
    object: Literal["file"]
    bytes: int
    created_at: int
    expires_at: int | None
    filename: str
    purpose: Literal["batch", "batch_output"]
    status: Literal["processed"]


class FileList(_Shape):
    object: Literal["list"]
    data: list[File]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedFile(_Shape):
    id: str
    object: Literal["file"]
    deleted: Literal[True]


class BatchErrorDetail(_Shape):
    code: str
    line: int | None
    message: str
    param: str | None


class BatchErrors(_Shape):
    object: Literal["list"]
    data: list[BatchErrorDetail]


class BatchRequestCounts(_Shape):
    total: int
    completed: int
    failed: int


class Batch(_Shape):
    id: str
    object: Literal["batch"]
    endpoint: str
    model: str
    errors: BatchErrors | None
    input_file_id: str
    completion_window: Literal["24h"]
    status: BatchStatus
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: int | None
    expires_at: int
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: BatchRequestCounts
    metadata: dict[str, str] | None


class BatchList(_Shape):
    object: Literal["list"]
    data: list[Batch]
    first_id: str | None
    last_id: str | None
    has_more: bool


BATCH_SHAPES: tuple[type[BaseModel], ...] = (File, FileList, DeletedFile, Batch, BatchList)
