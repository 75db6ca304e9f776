"""Checks a data directory: which store it belongs to, what lies in it that should not, who may read it.

``read_marks`` and ``observe`` read; the rest is pure.
"""

import fnmatch
import os
import stat
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from service.processes import lock_is_held
from service.settings import CONFIG_FILE_NAME
from service.store_access import MARK_FILES, Role, decisive_mark
from storage.errors import StorageError
from storage.findings import Check, Finding, Severity
from storage.records import StoreIdentity
from storage.store_file import StoreFile, describe_wrong_store, judge, load_store_file

POOL_FILE = "pool.safetensors"
_HERE = "data directory"
_OURS = {POOL_FILE, *MARK_FILES.values(), CONFIG_FILE_NAME, "redis", "run"}
#: Half-written files of processes that were killed, and pools beside the one.
_LEFT_OVER = (f".{POOL_FILE}.*.tmp", *(f".{name}.tmp" for name in MARK_FILES.values()), "*.safetensors")
_MOMENT = 0.05  #: seconds; far more than a writer takes from making a file to locking it
_PRIVATE = ("", "redis", "redis/*", "run", POOL_FILE, *MARK_FILES.values())


@dataclass(frozen=True, slots=True)
class SeenFile:
    path: str  #: relative to the data directory, which is ""
    mode: int  #: as of lstat
    being_made: bool = False


@dataclass(frozen=True, slots=True)
class Marks:
    """``store.json`` of engine and api; a finding where one cannot be read."""

    files: dict[Role, StoreFile]
    findings: tuple[Finding, ...]

    @property
    def engine_id(self) -> str:
        return self.files["engine"].engine_id if "engine" in self.files else ""


def read_marks(directory: Path) -> Marks:
    files: dict[Role, StoreFile] = {}
    findings = []
    for role, name in MARK_FILES.items():
        try:
            if (mark := load_store_file(directory / name)) is not None:
                files[role] = mark
        except StorageError as error:
            findings.append(Finding(Severity.DAMAGE, Check.STORE, name, error.message, error.hint))
    return Marks(files, tuple(findings))


def store_findings(marks: Marks, found: StoreIdentity | None) -> Iterator[Finding]:
    """What engine and api would say to this Redis at their start: the table of PROTOCOL.md 5."""
    engine, api = marks.files.get("engine"), marks.files.get("api")
    for name, own, other in ((MARK_FILES["engine"], engine, api), (MARK_FILES["api"], api, engine)):
        decisive = decisive_mark(own, other, found)
        if own is None or decisive is None:
            continue
        if judge(decisive, found).refused:
            wrong = describe_wrong_store(decisive.identity, found)
            yield Finding(Severity.DAMAGE, Check.STORE, name, wrong.message, wrong.hint)
        elif decisive is not own:
            what = f"is void: store {decisive.store_id} was accepted, as epoch {decisive.epoch}, with `recover --accept-store`"
            yield Finding(Severity.NOTE, Check.STORE, name, what)
    if not marks.files and not marks.findings:
        what = "the store is empty" if found is None else "no engine or api ever ran in this directory"
        yield Finding(Severity.NOTE, Check.STORE, _HERE, what)


def observe(directory: Path) -> list[SeenFile]:
    """Everything in the directory, two levels deep into what Redis keeps."""
    found = [SeenFile("", directory.stat().st_mode)]
    paths = {*directory.iterdir(), *directory.glob("redis/*"), *directory.glob("redis/appendonlydir/*")}
    for path in sorted(paths):
        try:
            mode = path.lstat().st_mode
        except FileNotFoundError:
            continue  # renamed or removed just now
        half_made = stat.S_ISREG(mode) and path.suffix == ".tmp"
        found.append(SeenFile(str(path.relative_to(directory)), mode, half_made and _is_being_made(path)))
    return found


def _is_being_made(path: Path) -> bool:
    """Its writer holds the lock, or had not taken it yet, or has renamed it since we saw it."""
    if lock_is_held(path):
        return True
    time.sleep(_MOMENT)
    return not path.exists() or lock_is_held(path)


def file_findings(files: Iterable[SeenFile]) -> Iterator[Finding]:
    for file in files:
        top = bool(file.path) and os.sep not in file.path
        if top and file.path not in _OURS and _fits(file.path, _LEFT_OVER):
            if not file.being_made:
                yield _file(Severity.REPAIRABLE, file, "was left behind by a process that died", f"rm {file.path}")
        elif top and file.path not in _OURS:
            yield _file(Severity.NOTE, file, "is not a file of ours")
        elif _fits(file.path, _PRIVATE) and not stat.S_ISSOCK(file.mode) and stat.S_IMODE(file.mode) & 0o077:
            right = 0o700 if stat.S_ISDIR(file.mode) else 0o600
            what = f"can be read by others (mode {stat.S_IMODE(file.mode):o}): it holds what users wrote"
            yield _file(Severity.REPAIRABLE, file, what, f"chmod {right:o} {file.path or '.'}")


def _file(severity: Severity, file: SeenFile, what: str, fix: str = "") -> Finding:
    return Finding(severity, Check.FILE, file.path or _HERE, what, fix)


def _fits(path: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatchcase(path, pattern) for pattern in patterns)
