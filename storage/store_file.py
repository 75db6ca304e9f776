"""``store.json`` in a data directory: which store we belong to and how far we have seen it come (PROTOCOL.md 5).

It is written after a reply, at most once a second: a lower bound of what Redis acknowledged. Putting back the whole directory is
a consistent past and cannot be told from the present.
"""

import fcntl
import json
import os
from dataclasses import asdict, dataclass, fields
from enum import StrEnum
from pathlib import Path

from storage.errors import StorageError, WrongStore
from storage.failpoints import hit
from storage.records import StoreIdentity


@dataclass(frozen=True, slots=True)
class StoreFile:
    engine_id: str  #: "" in a directory that never had an engine
    store_id: str
    epoch: int
    commit: int

    @property
    def identity(self) -> StoreIdentity:
        return StoreIdentity(self.store_id, self.epoch, self.commit)


class Verdict(StrEnum):
    CREATE = "create"  #: neither file nor store: create the store, then write the file
    JOIN = "join"  #: a store, and we are new to it
    GO_ON = "go_on"
    REFUSE_OTHER = "refuse_other"
    REFUSE_GONE = "refuse_gone"
    REFUSE_LOST = "refuse_lost"

    @property
    def refused(self) -> bool:
        return self in (Verdict.REFUSE_OTHER, Verdict.REFUSE_GONE, Verdict.REFUSE_LOST)


def judge(file: StoreFile | None, redis: StoreIdentity | None) -> Verdict:
    """The table of PROTOCOL.md 5. Pure."""
    if file is None:
        return Verdict.CREATE if redis is None else Verdict.JOIN
    if redis is None:
        return Verdict.REFUSE_GONE
    if redis.store_id != file.store_id:
        return Verdict.REFUSE_OTHER
    if (file.epoch, file.commit) > (redis.epoch, redis.commit):
        return Verdict.REFUSE_LOST
    return Verdict.GO_ON


def describe_wrong_store(ours: StoreIdentity, found: StoreIdentity | None) -> WrongStore:
    """The refusals of that table, in words. Also for a store whose epoch went on while we were bound to it."""
    accept = "put the right Redis back, or look with `midsentence recover` and accept with `recover --accept-store`"
    if found is None or not found.store_id:
        return WrongStore(f"store {ours.store_id} is gone: Redis is empty", accept)
    if found.store_id != ours.store_id:
        return WrongStore(f"Redis holds store {found.store_id}, we belong to store {ours.store_id}", accept)
    if found.epoch > ours.epoch:
        return WrongStore(f"the store was accepted anew as epoch {found.epoch}, ours was {ours.epoch}", "restart this process")
    if found.epoch < ours.epoch:
        return WrongStore(f"Redis lost commits: it is at epoch {found.epoch}, we have seen epoch {ours.epoch}", accept)
    return WrongStore(f"Redis lost commits {found.commit + 1}..{ours.commit}", accept)


def load_store_file(path: Path) -> StoreFile | None:
    """None when there is none. StorageError when there is one that cannot be read: guessing would forget what was promised."""
    try:
        with open(path, encoding="utf-8", opener=_without_links) as file:
            text = file.read()
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise _broken(path, str(error)) from error
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _broken(path, f"not JSON: {error}") from error
    kinds = {f.name: f.type for f in fields(StoreFile)}
    if not isinstance(values, dict) or values.keys() != kinds.keys():
        raise _broken(path, f"it needs exactly the fields {', '.join(kinds)}")
    for name, kind in kinds.items():
        if type(values[name]) is not kind or (kind is int and values[name] < 0):
            raise _broken(path, f"field {name} is {values[name]!r}")
    return StoreFile(**values)


def _without_links(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC)


def _broken(path: Path, why: str) -> StorageError:
    return StorageError(f"{path} cannot be used: {why}", "put it back from a copy, or remove it to join the store as a new engine")


def save_store_file(path: Path, file: StoreFile) -> None:
    """tmp -> fsync -> rename -> fsync directory: the old file or the new one, whenever the machine stops. OSError as it comes."""
    temporary = path.with_name(f".{path.name}.tmp")  # one name: what a kill left of it is written over, and never piles up
    data = json.dumps(asdict(file), indent=2).encode() + b"\n"
    try:
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)  # tells `verify` that it is being written, until it has its name
            os.write(fd, data)
            os.fsync(fd)
            hit("store_file.before_rename")
            os.replace(temporary, path)
        finally:
            os.close(fd)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    hit("store_file.after_rename")
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
