"""One check of one installation: its marks, its Redis, its pool, its files. Collects findings; changes nothing."""

import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

from service.directory_audit import POOL_FILE, Marks, file_findings, observe, read_marks, store_findings
from service.processes import lock_is_held
from service.settings import Settings
from service.store_access import MARK_FILES
from storage import keys
from storage.audit import LOOK_AGAIN, RedisAudit
from storage.codec import engine_record, pairs
from storage.errors import PoolError
from storage.findings import Check, Finding, Severity
from storage.job_audit import damage
from storage.pool_audit import Entries, bad_pages, header_findings, page_finding, read_table, table_findings
from storage.pool_reader import PoolReader
from storage.records import EngineInfo, EngineRecord
from storage.session import Session

OnProgress = Callable[[int, int], None]  #: done, of how many


class Verification:
    """``live``: others may write meanwhile. ``findings``, ``checked`` and ``service_running`` are there after ``run``."""

    def __init__(self, settings: Settings, session: Session, *, live: bool) -> None:
        self._directory = settings.data_dir
        self._run_dir = settings.run_dir
        self._session = session
        self._wire = session.plain
        self._live = live
        self.findings: list[Finding] = []
        self.checked: Counter[str] = Counter()
        self.service_running = False
        # The marks come first: they are a lower bound of what Redis says afterwards.
        self._marks: Marks = read_marks(self._directory)
        self._identity = session.identity()

    def run(self, *, on_jobs: OnProgress, on_pages: OnProgress) -> None:
        """Raises StorageError where Redis does not answer."""
        before = self._beats()
        self.findings += self._marks.findings
        self.findings += store_findings(self._marks, self._identity)
        self.findings += self._redis(on_jobs)
        self.findings += self._pools(on_pages)
        self.findings += self._files()
        self.findings += self._went_back()
        names = ("supervisor", "engine", "api")
        held = any(lock_is_held(self._run_dir / f"{name}.lock") for name in names)
        self.service_running = held or self._beats() != before

    def store(self) -> dict[str, Any]:
        marks: dict[str, Any] = {MARK_FILES[role]: asdict(mark) for role, mark in self._marks.files.items()}
        return {"redis": None if self._identity is None else asdict(self._identity), "marks": marks}

    # Redis -----------------------------------------------------------------------------------------------------------
    def _redis(self, on_jobs: OnProgress) -> Iterator[Finding]:
        total = int(self._wire.call("ZCARD", keys.index("all", None)))
        audit = RedisAudit(self._wire, live=self._live, on_jobs=lambda done: on_jobs(done, total))
        yield from audit.findings()
        self.checked += audit.checked
        if self._identity is None and audit.checked["keys"]:
            yield damage(Check.STORE, "store", f"there are {audit.checked['keys']} keys of ours and no store that they belong to")

    def _went_back(self) -> Iterator[Finding]:
        now = self._session.identity()
        if self._identity is not None and (now is None or (now.epoch, now.commit) < (self._identity.epoch, self._identity.commit)):
            yield damage(Check.STORE, "store", f"Redis went back while it was looked at: from {self._identity} to {now}")

    def _beats(self) -> dict[str, tuple[str, int]]:
        return {engine.info.engine_id: (engine.incarnation, engine.beat) for engine in self._engines()}

    def _engines(self) -> Iterator[EngineRecord]:
        """Those that can be read; the audit tells of the others."""
        for engine_id in sorted(self._wire.call("SMEMBERS", keys.ENGINES)):
            try:
                yield engine_record(engine_id, pairs(self._wire.call("HGETALL", keys.engine(engine_id))), ())
            except (KeyError, ValueError):
                continue

    # pool ------------------------------------------------------------------------------------------------------------
    def _pools(self, on_pages: OnProgress) -> Iterator[Finding]:
        own = self._marks.engine_id
        self.checked["pages"] = 0
        for engine in self._engines():
            self.checked["engines"] += 1
            info = engine.info
            entries, unreadable = self._table(info.pool_id)
            yield from unreadable
            if info.engine_id == own:
                yield from self._own_pool(info, entries, on_pages)
            elif entries:
                what = f"its {len(entries)} pages are in another data directory, on {info.host}: they are checked there"
                yield Finding(Severity.NOTE, Check.ENGINE, info.engine_id, what)

    def _own_pool(self, info: EngineInfo, entries: Entries, on_pages: OnProgress) -> Iterator[Finding]:
        if not info.pool_id:
            return  # --host-pages 0: a pool file of an earlier life is not read
        try:
            reader = PoolReader(self._directory / POOL_FILE)
        except PoolError as error:
            fix = error.hint or "nothing: the next start makes a new one, and jobs recompute their pages"
            yield Finding(Severity.REPAIRABLE, Check.POOL, POOL_FILE, error.message, fix)
            return
        try:
            yield from header_findings(reader.header, info)
            if reader.header.pool_id != info.pool_id:
                return  # entries of another file
            yield from table_findings(entries, reader.header.num_pages)
            self.checked["pages"] = len(entries)
            bad = bad_pages(reader, entries, lambda done: on_pages(done, len(entries)))
            if self._live:
                bad = self._still_bad(reader, info.pool_id, entries, bad)
            yield from map(page_finding, bad)
        finally:
            reader.close()

    def _still_bad(self, reader: PoolReader, pool_id: str, entries: Entries, bad: list[int]) -> list[int]:
        """Bad while their entry stood, before and after they were read: else the engine used the page again meanwhile."""
        for pause in LOOK_AGAIN if bad else ():
            time.sleep(pause)
            bad = bad_pages(reader, {page: entries[page] for page in bad})
            now, _ = self._table(pool_id)
            bad = [page for page in bad if now.get(page) == entries[page]]
        return bad

    def _table(self, pool_id: str) -> tuple[Entries, list[Finding]]:
        return read_table(pairs(self._wire.call("HGETALL", keys.pool(pool_id)))) if pool_id else ({}, [])

    # directory -------------------------------------------------------------------------------------------------------
    def _files(self) -> Iterator[Finding]:
        files = observe(self._directory)
        self.checked["files"] = len(files)
        found = list(file_findings(files))
        if found and self._live:  # a mark that is being written is another file the next time
            time.sleep(LOOK_AGAIN[-1])
            again = set(file_findings(observe(self._directory)))
            found = [finding for finding in found if finding in again]
        yield from found
