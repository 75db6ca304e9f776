"""The contract of files and batches, beside that of jobs: ``JobStore.batches`` has it. Two implementations pass one suite.

As there: synchronous, may be sent twice with the same arguments, and raises only what ``storage.errors`` names.
"""

from collections.abc import Sequence
from typing import Protocol

from storage.batch_records import (
    BatchError,
    BatchOutput,
    BatchPage,
    BatchRecord,
    BatchStatus,
    ChunkOutcome,
    CreatedBatch,
    CreatedFile,
    FedLine,
    FeedOutcome,
    FilePage,
    FileRecord,
    NewBatch,
    NewFile,
)


class BatchStore(Protocol):
    # files -----------------------------------------------------------------------------------------------------------
    def put_chunk(self, upload_id: str, number: int, content: bytes, *, limit: int) -> ChunkOutcome:
        """``CHUNK`` bytes of an upload, from number 0 on; of the last one, what is left. ``limit``: bytes of all files and uploads.

        Raises StoreFull where memory is short.
        """

    def create_file(self, file: NewFile, *, limit: int) -> CreatedFile:
        """The end of an upload: before this call there is no file. ``limit``: files of the tenant."""

    def drop_upload(self, upload_id: str) -> bool:
        """Forget an upload that became no file; whether there was one."""

    def file(self, file_id: str) -> FileRecord | None: ...

    def files(self, tenant: str, *, limit: int, before: int | None = None) -> FilePage:
        """Newest first, those of a lower order than ``before``."""

    def chunk(self, file: FileRecord, number: int) -> bytes | None:
        """None: the file is gone."""

    def delete_file(self, file_id: str) -> bool:
        """It is seen no more. Its bytes go at once, or with the last batch that was made of it."""

    # batches ---------------------------------------------------------------------------------------------------------
    def create_batch(self, batch: NewBatch, *, limit: int) -> CreatedBatch:
        """``limit``: live batches of all tenants."""

    def batch(self, batch_id: str) -> BatchRecord | None: ...

    def input_file(self, batch_id: str) -> FileRecord | None:
        """What the batch was made of, for the batch: also after its tenant deleted it."""

    def batch_page(self, tenant: str, *, limit: int, before: int | None = None) -> BatchPage:
        """Newest first, those of a lower order than ``before``."""

    def live_batches(self) -> list[BatchRecord]:
        """Of all tenants, oldest first."""

    def counts(self) -> dict[BatchStatus, int]:
        """Batches by status, kept by the scripts."""

    def begin_batch(self, batch_id: str, total: int, errors: Sequence[BatchError]) -> BatchRecord | None:
        """The end of validation: in progress, or failed with these errors. The record afterwards."""

    def feed(
        self, batch_id: str, lines: Sequence[FedLine], *, window: int, queue_limit: int, tenant_limit: int | None = None
    ) -> list[FeedOutcome]:
        """Make the jobs of the next lines, in one pipeline, each line once whoever feeds. ``window``: lines under way at once."""

    def cancel_batch(self, batch_id: str) -> BatchRecord | None:
        """Nothing more of it is fed; ``advance_batch`` ends what runs. The record afterwards; one that has ended stays as it is."""

    def advance_batch(self, batch_id: str) -> bool:
        """What comes unasked: it expires; of one that is to end, at most 64 jobs are ended. Call again until False."""

    def delete_output(self, batch_id: str, which: BatchOutput) -> bool:
        """It is seen no more; the lines go with the batch's jobs. False: it was deleted before, or the batch is gone."""

    def touch_batch(self, batch_id: str) -> None:
        """Somebody reads its files: no sweep takes it in the next minutes."""

    # sweeps: any process, any time -----------------------------------------------------------------------------------
    def sweep_files(self, retention_seconds: float, *, limit: int = 100) -> int:
        """Remove uploads that got no bytes for an hour, and files that no batch was made of for so long; how many.

        Refuses (StorageError "clock step?") as sweeps of jobs do.
        """

    def sweep_batches(self, retention_seconds: float, *, limit: int = 100) -> int:
        """Purge batches that ended longer ago than that, with their jobs and input files, in steps of about ``limit`` jobs.

        One step of one batch for each call; the number of jobs removed. Refuses as above.
        """
