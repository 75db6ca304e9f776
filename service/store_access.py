"""Opening the job store: is it configured to keep what it acknowledges, and is it the one this data directory belongs to?

Engine and api each keep their own mark (two writers on one file could take each other's back). What the other's file says counts
too: the directory as a whole belongs to one store.
"""

import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from service.errors import Stopped
from service.logs import get_logger
from service.processes import prepare_directory
from service.settings import Settings
from storage.errors import StorageError, StoreFull, StoreUnavailable
from storage.job_store import JobStore
from storage.records import StoreIdentity
from storage.redis_store import RedisJobStore
from storage.store_file import StoreFile, Verdict, describe_wrong_store, judge, load_store_file, save_store_file

Role = Literal["engine", "api"]
MARK_FILES: dict[Role, str] = {"engine": "store.json", "api": "api-store.json"}
_MARK_INTERVAL = 1.0
_TRY_AGAIN = 0.5  #: seconds in which the api answers with the last failure, so that a hung Redis does not queue up its threads
_LONGEST_PAUSE = 1.0
_SAY_AGAIN = 10.0

log = get_logger("store")


@dataclass(frozen=True, slots=True)
class OpenStore:
    store: RedisJobStore
    mark: "MarkWriter"
    engine_id: str  #: of this data directory; "" for an api
    another: Callable[[], RedisJobStore]  #: the same store over connections of its own, for another thread


def open_store(settings: Settings, *, role: Role, stop: threading.Event | None = None) -> OpenStore:
    """Open it, waiting for a Redis that is away, loading or full, for as long as it takes.

    Raises Stopped, WrongStore, StoreMisconfigured, and StorageError where the mark cannot be read.
    """
    stop = stop or threading.Event()
    opener, pause, said = StoreOpener(settings, role), 0.05, 0.0
    while not stop.is_set():
        try:
            return opener.open()
        except (StoreUnavailable, StoreFull) as error:
            if time.monotonic() - said >= _SAY_AGAIN:
                said = time.monotonic()
                log.warning("waiting_for_redis", problem=str(error))
            stop.wait(pause)
            pause = min(pause * 2, _LONGEST_PAUSE)
    raise Stopped


class StoreOpener:
    """Opens without waiting. As a function (any thread) it answers with the open store: what the api asks for at every call."""

    def __init__(self, settings: Settings, role: Role) -> None:
        self._settings = settings
        self._role = role
        self._lock = threading.Lock()
        self._opened: OpenStore | None = None
        self._failure: StorageError | None = None
        self._failed_at = 0.0

    def __call__(self) -> JobStore:
        """Raises StoreUnavailable while Redis is away, WrongStore and StoreMisconfigured for as long as they hold."""
        if (opened := self._opened) is not None:
            return opened.store
        with self._lock:
            if self._opened is None:
                self._opened = self._open_unless_just_failed()
            return self._opened.store

    def close(self) -> None:
        """Write the mark and close all connections."""
        with self._lock:
            if self._opened is not None:
                self._opened.mark.flush()
                self._opened.store.close()
                self._opened = None

    def _open_unless_just_failed(self) -> OpenStore:
        if self._failure is not None and time.monotonic() - self._failed_at < _TRY_AGAIN:
            raise self._failure
        try:
            return self.open()
        except StorageError as error:
            self._failure, self._failed_at = error, time.monotonic()
            raise

    def open(self) -> OpenStore:
        single = self._role == "engine"  # its answers must be ordered (PROTOCOL.md 2)
        store = RedisJobStore(self._redis_url(), single_connection=single, client_name=f"midsentence-{self._role}")
        try:
            for warning in store.check_settings(self._settings.allow_weak_durability):
                log.warning("redis_settings", warning=warning)
            file = self._bind(store)
        except BaseException:
            store.close()
            raise
        poll = None if self._role == "engine" else lambda: _commit_of(store, file.identity)
        mark = MarkWriter(self._path(self._role), file, poll=poll)
        return OpenStore(store, mark, file.engine_id, lambda: self._another(mark))

    def _another(self, mark: "MarkWriter") -> RedisJobStore:
        store = RedisJobStore(self._redis_url(), client_name=f"midsentence-{self._role}")
        store.bind(mark.file.identity)
        return store

    def _bind(self, store: RedisJobStore) -> StoreFile:
        """The mark as it stands now, after the store was judged, made if there was none, and bound."""
        prepare_directory(self._settings.data_dir)
        other: Role = "api" if self._role == "engine" else "engine"
        own, others = load_store_file(self._path(self._role)), load_store_file(self._path(other))
        found = store.identity()
        decisive = decisive_mark(own, others, found)
        verdict = judge(decisive, found)
        if verdict.refused:
            assert decisive is not None
            error = describe_wrong_store(decisive.identity, found)
            if verdict is not Verdict.REFUSE_LOST or not self._settings.allow_weak_durability:
                raise error
            log.warning("lost_commits_accepted", problem=error.message)
        identity = found or store.create(secrets.token_hex(16))
        engine_id = own.engine_id if own is not None else ""
        if self._role == "engine" and not engine_id:
            engine_id = f"engine-{secrets.token_hex(8)}"
        file = StoreFile(engine_id, identity.store_id, identity.epoch, identity.commit)
        self._save(file, own)
        store.bind(identity)
        return file

    def _save(self, file: StoreFile, own: StoreFile | None) -> None:
        """A mark of this store that is there stays a lower bound; without one nothing can begin: StorageError."""
        path = self._path(self._role)
        try:
            save_store_file(path, file)
        except OSError as error:
            if own is None or own.engine_id != file.engine_id or (own.store_id, own.epoch) != (file.store_id, file.epoch):
                raise StorageError(f"{path} cannot be written: {error}", "free space on that disk, or mend it") from error
            log.warning("store_mark_not_written", path=str(path), problem=str(error))

    def _path(self, role: Role) -> Path:
        return self._settings.data_dir / MARK_FILES[role]

    def _redis_url(self) -> str:
        assert self._settings.redis_url is not None, "the command line puts the embedded Redis's URL here"
        return self._settings.redis_url


def decisive_mark(own: StoreFile | None, others: StoreFile | None, found: StoreIdentity | None) -> StoreFile | None:
    """Which of the directory's two marks to judge the store by: ours, if there is one.

    But where the other's belongs to another store or a later epoch, and the Redis we found is just that, then a person accepted
    this store (``recover --accept-store``), which voids our mark.
    """
    if own is None or others is None:
        return own or others
    accepted = others.store_id != own.store_id or others.epoch > own.epoch
    return others if accepted and judge(others, found) is Verdict.GO_ON else own


class MarkWriter:
    """Keeps a mark file close behind what Redis acknowledged: at most one write a second, on a thread of its own.

    Only what a reply said is ever given to ``update``, so the file is a lower bound. ``poll`` asks for it where no reply tells.
    """

    def __init__(
        self, path: Path, file: StoreFile, *, poll: Callable[[], int | None] | None = None, interval: float = _MARK_INTERVAL
    ) -> None:
        self._path = path
        self._file = file
        self._written = file.commit
        self._poll = poll
        self._interval = interval
        self._lock = threading.Lock()
        self._writing = threading.Lock()
        self._failing = False
        self._thread = threading.Thread(target=self._run, name="store-mark", daemon=True)
        self._ended = threading.Event()
        self._thread.start()

    @property
    def file(self) -> StoreFile:
        with self._lock:
            return self._file

    def update(self, commit: int) -> None:
        """A reply carried this commit number. Cheap; any thread."""
        with self._lock:
            if commit > self._file.commit:
                self._file = replace(self._file, commit=commit)

    def flush(self) -> None:
        """Write now, and end the thread: the last act of a drain."""
        self._ended.set()
        self._ask()
        self._write()

    def _run(self) -> None:
        while not self._ended.wait(self._interval):
            self._ask()
            self._write()

    def _ask(self) -> None:
        if self._poll is not None and (commit := self._poll()) is not None:
            self.update(commit)

    def _write(self) -> None:
        """A full disk costs the mark its freshness and nothing else: it stays a lower bound."""
        with self._writing:
            file = self.file
            if file.commit == self._written:
                return
            try:
                save_store_file(self._path, file)
            except OSError as error:
                if not self._failing:
                    log.warning("store_mark_not_written", path=str(self._path), problem=str(error))
                self._failing = True
            else:
                self._written, self._failing = file.commit, False


def _commit_of(store: RedisJobStore, bound: StoreIdentity) -> int | None:
    """Redis's counter now, if this is still our store. None while it does not answer."""
    try:
        found = store.identity()
    except StorageError:
        return None
    same = found is not None and (found.store_id, found.epoch) == (bound.store_id, bound.epoch)
    return found.commit if found is not None and same else None
