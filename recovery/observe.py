"""What recovery sees: jobs, logs, pool table and pool file, read at one moment and changed by nobody here."""

from collections.abc import Callable
from pathlib import Path

from recovery.plan import Observation, ObservedJob
from storage.errors import PoolError
from storage.job_store import JobStore
from storage.pool_reader import PoolReader
from storage.records import EngineRecord, JobRecord, JobStatus, LogEntry, LogRead, PageEntry

_LOG_PAGE = 10_000


def unfinished_jobs(store: JobStore) -> list[JobRecord]:
    """Every queued and in-progress job of every tenant, in the order in which they were accepted."""
    found: dict[str, JobRecord] = {}
    for status in (JobStatus.IN_PROGRESS, JobStatus.QUEUED):
        cursor: str | None = None
        while True:
            page = store.jobs(status=status, tenant=None, limit=100, cursor=cursor)
            found |= {record.job_id: record for record in page.jobs}
            cursor = page.next_cursor
            if cursor is None:
                break
    return sorted(found.values(), key=lambda record: record.order)


def whole_log(store: JobStore, record: JobRecord) -> tuple[LogEntry, ...]:
    entries: list[LogEntry] = []
    while len(entries) < record.log_length:
        (part,) = store.read([LogRead(record.job_id, len(entries), _LOG_PAGE)])
        if part is None or not part.entries:
            break
        entries += part.entries
    return tuple(entries[: record.log_length])


def open_pool(path: Path) -> PoolReader | None:
    """None when there is no usable pool file: recovery then replays everything."""
    try:
        return PoolReader(path)
    except PoolError:
        return None


def observe(store: JobStore, engine: EngineRecord, pool: PoolReader | None, *, is_alive: Callable[[str], bool]) -> Observation:
    """Everything that an engine with this record and this pool would find at its next start."""
    jobs = [
        ObservedJob(record, whole_log(store, record), owner_alive=bool(record.engine_id) and is_alive(record.engine_id))
        for record in unfinished_jobs(store)
    ]
    table = store.pool_table(pool.header.pool_id) if pool is not None else {}
    return Observation(
        engine_id=engine.info.engine_id,
        model_fingerprint=engine.info.model_fingerprint,
        arithmetic_fingerprint=engine.info.arithmetic_fingerprint,
        page_size=engine.info.page_size,
        prefill_chunk=engine.info.prefill_chunk,
        jobs=tuple(jobs),
        table=table,
        page_ok=pool.page_ok if pool is not None else _no_pool,
    )


def _no_pool(_page: int, _entry: PageEntry) -> bool:
    return False
