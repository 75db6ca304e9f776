"""``midsentence recover``: what a start would do, and the few decisions that only a person may take.

``observe -> plan -> execute``. Without options it fails what cannot go on (damaged logs, jobs of a newer version) and says what
``serve`` will do with the rest: replaying and restoring are the engine's work. Beside a living engine it only looks.
"""

import json
import os
import sys
import time
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from rich.console import Console
from rich.table import Column, Table

from recovery.observe import observe, open_pool
from recovery.plan import Action, JobPlan, Plan, plan
from service.borrowed_redis import borrowed_redis
from service.errors import ServiceError
from service.processes import Exit, lock_is_held
from service.settings import Settings
from storage.job_store import JobStore
from storage.pool_reader import PoolReader
from storage.records import EngineRecord, StoreIdentity
from storage.redis_store import RedisJobStore
from storage.store_file import StoreFile, describe_wrong_store, judge, load_store_file, save_store_file

_BEAT_WATCH = 2.5  #: seconds: a living engine beats once a second


class RecoverError(ServiceError):
    pass


@dataclass(frozen=True, slots=True)
class Options:
    dry_run: bool = False
    as_json: bool = False
    release: bool = False
    fail: str | None = None
    accept_store: bool = False


@dataclass(slots=True)
class Report:
    """Everything the command found and did; ``--json`` prints it as it is."""

    store: dict[str, Any]
    engine: dict[str, Any] | None = None
    pool: dict[str, Any] | None = None
    jobs: list[dict[str, Any]] = field(default_factory=list)
    summary: dict[str, int] = field(default_factory=dict)
    done: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def main(settings: Settings, options: Options) -> int:
    """Print the report; 0, or 1 when a page that a job needs is bad. Refusals are raised (exit code 78)."""
    if not settings.data_dir.is_dir():
        raise RecoverError(f"there is no data directory {settings.data_dir}", "name it with --data-dir")
    with borrowed_redis(settings) as borrowed:
        store = RedisJobStore(borrowed.url)
        try:
            report, healthy = _recover(settings, store, options)
        finally:
            store.close()
    print(json.dumps(asdict(report), indent=2)) if options.as_json else _print(report, Console())
    return Exit.OK if healthy else Exit.FAILED


def _recover(settings: Settings, store: RedisJobStore, options: Options) -> tuple[Report, bool]:
    path = settings.data_dir / "store.json"
    mark = load_store_file(path)
    identity = store.identity()
    report = Report(store=_store_report(mark, identity))
    verdict = judge(mark, identity)
    changes = not options.dry_run
    if verdict.refused:
        assert mark is not None
        lost = describe_wrong_store(mark.identity, identity)
        if not options.accept_store or not changes:
            raise lost
        report.notes.append(f"accepted: {lost.message}")
        identity = _accept(store, mark, path, identity)
        report.done.append(f"accepted the store as it is: epoch {identity.epoch}; jobs go on from their logs")
    if identity is None:
        report.notes.append("the store is empty: there is nothing to recover")
        return report, True
    store.bind(identity)
    if mark is None:
        report.notes.append("no engine ever ran in this directory")
        return report, True
    return report, _recover_engine(settings, store, options, report, mark.engine_id)


def _recover_engine(settings: Settings, store: RedisJobStore, options: Options, report: Report, engine_id: str) -> bool:
    engine = next((e for e in store.engines() if e.info.engine_id == engine_id), None)
    if engine is None:
        report.notes.append("this directory's engine never registered: its jobs, if any, wait in the queue")
        return True
    alive = _is_alive(settings, store, engine)
    report.engine = _engine_report(engine, alive)
    pool = None if settings.host_pages == 0 else open_pool(settings.data_dir / "pool.safetensors")  # 0: a start would not read it
    report.pool = _pool_report(store, pool)
    living = {engine_id} if alive else set()
    seen = observe(store, engine, pool, is_alive=lambda other: other in living)
    planned = plan(seen)
    report.jobs = [asdict(job) for job in planned.jobs]
    report.summary = {action.value: sum(job.action is action for job in planned.jobs) for action in Action}
    if alive:
        report.notes.append("the engine is running: nothing is changed beside it")
        if options.release or options.fail:
            raise RecoverError("the engine of this directory is running", "cancel jobs over the API, or stop it first")
    elif not options.dry_run:
        _execute(store, options, engine, planned, report)
    if pool is not None:
        pool.close()
    return not planned.bad_pages


def _execute(store: JobStore, options: Options, engine: EngineRecord, planned: Plan, report: Report) -> None:
    """Compare and set on what was observed: a job that changed meanwhile is skipped, not failed."""
    for job in planned.jobs:
        if job.action is Action.FAIL:
            _fail(store, job, job.code, job.reason, report)
    if options.fail is not None:
        known = next((job for job in planned.jobs if job.job_id == options.fail), None)
        if known is None:
            raise RecoverError(f"no unfinished job {options.fail}", "`midsentence recover --dry-run` lists them")
        _fail(store, known, "failed_by_operator", "ended with `midsentence recover --fail`", report)
    if options.release:
        moved = 0
        while count := store.take_over(engine.info.engine_id, engine.incarnation, engine.beat):
            moved += count
        report.done.append(f"gave {moved} jobs back to the queue")


def _fail(store: JobStore, job: JobPlan, code: str, message: str, report: Report) -> None:
    record = store.get(job.job_id)
    if record is None or record.status.terminal or record.fence != job.fence:
        report.done.append(f"{job.job_id}: changed meanwhile, skipped")
        return
    store.fail(job.job_id, code, message)
    report.done.append(f"{job.job_id}: failed ({code})")


def _accept(store: RedisJobStore, mark: StoreFile | None, path: Any, identity: StoreIdentity | None) -> StoreIdentity:
    if identity is None:
        identity = store.create(os.urandom(16).hex())
    store.bind(identity)
    identity = store.raise_epoch()
    assert mark is not None
    accepted = replace(mark, store_id=identity.store_id, epoch=identity.epoch, commit=identity.commit)
    save_store_file(path, accepted)
    return identity


def _is_alive(settings: Settings, store: JobStore, engine: EngineRecord) -> bool:
    """Alive: somebody holds the supervisor's lock here, or the beat moves while we look."""
    if lock_is_held(settings.run_dir / "supervisor.lock"):
        return True
    deadline = time.monotonic() + _BEAT_WATCH
    while time.monotonic() < deadline:
        now = next((e for e in store.engines() if e.info.engine_id == engine.info.engine_id), None)
        if now is None:
            return False
        if (now.incarnation, now.beat) != (engine.incarnation, engine.beat):
            return True
        if engine.dead:
            return False
        time.sleep(0.25)
    return False


def _store_report(mark: StoreFile | None, identity: StoreIdentity | None) -> dict[str, Any]:
    return {
        "redis": asdict(identity) if identity is not None else None,
        "mark": {"store_id": mark.store_id, "epoch": mark.epoch, "commit": mark.commit} if mark is not None else None,
    }


def _engine_report(engine: EngineRecord, alive: bool) -> dict[str, Any]:
    info = engine.info
    return {
        "engine_id": info.engine_id,
        "incarnation": engine.incarnation,
        "alive": alive,
        "host": info.host,
        "model": info.model_name,
        "model_fingerprint": info.model_fingerprint,
        "jobs": list(engine.job_ids),
    }


def _pool_report(store: JobStore, pool: PoolReader | None) -> dict[str, Any] | None:
    if pool is None:
        return None
    return {
        "pool_id": pool.header.pool_id,
        "num_pages": pool.header.num_pages,
        "published_pages": len(store.pool_table(pool.header.pool_id)),
    }


def _print(report: Report, console: Console) -> None:
    for note in report.notes:
        print(note, file=sys.stderr)
    if report.jobs:
        table = Table(Column("job", min_width=36, no_wrap=True), "action", "tokens", "pages restored", "tokens replayed", "reason")
        for job in report.jobs:
            numbers = (job["committed_tokens"], job["pages_restored"], job["tokens_replayed"])
            table.add_row(job["job_id"], job["action"], *map(str, numbers), job["reason"])
        console.print(table)
    console.print(", ".join(f"{count} {action}" for action, count in report.summary.items() if count) or "no unfinished jobs")
    for line in report.done:
        console.print(line)
