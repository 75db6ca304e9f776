"""API keys: who may call, and as which tenant. Needs no Redis, so an outage of the store locks nobody out and lets nobody in.

A file holds one line for each key: the tenant and the SHA-256 of the key, in hex. A key is 256 random bits, which no dictionary
holds: a plain hash of it gives nothing away, so the file is no secret. It decides who is let in, so it must be ours to write.
"""

import hashlib
import hmac
import os
import re
import secrets
import stat
from dataclasses import dataclass
from pathlib import Path

from service.errors import SettingsError
from service.logs import get_logger

#: Becomes part of a Redis key, and of the identities of pages.
_TENANT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_DIGEST = re.compile(r"[0-9a-f]{64}")
WITHHELD_REASON = "this server's log says why"  #: for those who ask without a key
_KEY_PREFIX = "ms-"  #: so that a key in the wrong place is recognised as one
_Version = tuple[int, int, int]
_log = get_logger("api_keys")


@dataclass(frozen=True, slots=True)
class Key:
    tenant: str
    digest: bytes  #: SHA-256 of the key as it is sent


class ApiKeys:
    """The keys of one file, read again whenever it changes: who is added or removed counts from the next request on.

    At the start a file that is not right is refused. Later, whatever cannot be read grants nothing, and the log says so. Any
    thread may ask.
    """

    def __init__(self, path: Path) -> None:
        """Raises SettingsError that names file, line and fix."""
        self._path = path
        version = _version(path)
        keys, problems = _read(path)
        if problems:
            raise SettingsError(problems[0], "`midsentence keys add TENANT` makes the file, and keys")
        self._seen = version, keys

    def tenant_of(self, authorization: str) -> str | None:
        """The tenant whose key this ``Authorization`` header carries. A wrong key takes as long as any right one."""
        scheme, _, key = authorization.partition(" ")
        digest = _digest(key.strip())
        found = None
        for known in self._keys():
            if hmac.compare_digest(known.digest, digest):
                found = known.tenant  # and on: where the loop ends must not tell which key it was
        return found if scheme.lower() == "bearer" else None

    def _keys(self) -> tuple[Key, ...]:
        version, keys = self._seen
        if (now := _version(self._path)) != version:  # a stat takes a microsecond
            keys, problems = _read(self._path)
            self._seen = now, keys
            for problem in problems:
                _log.error("api_keys_refused", problem=problem)
            _log.info("api_keys_read", keys=len(keys))
        return keys


def add_key(path: Path, tenant: str) -> str:
    """A new key of ``tenant``; its hash is the last line of the file from now on. The key itself is kept nowhere."""
    if not _TENANT.fullmatch(tenant):
        raise SettingsError(f"{tenant!r} cannot name a tenant", "1 to 64 letters, digits, '.', '_' or '-', the first no sign")
    key = f"{_KEY_PREFIX}{secrets.token_urlsafe(32)}"
    line = f"{tenant} {_digest(key).hex()}\n"
    try:
        fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            size = os.fstat(fd).st_size
            if size and os.pread(fd, 1, size - 1) != b"\n":  # written by hand
                line = f"\n{line}"
            os.write(fd, line.encode())
            os.fsync(fd)
        finally:
            os.close(fd)
    except OSError as error:
        raise SettingsError(f"cannot add a key to {path}: {error.strerror}", "check the path, and who may write there") from error
    return key


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


def _version(path: Path) -> _Version | None:
    """Differs whenever the file was written, replaced, or given another owner or mode; None when it is not there."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_ino, status.st_ctime_ns, status.st_size


def _read(path: Path) -> tuple[tuple[Key, ...], list[str]]:
    """(keys, what is wrong). A line that is wrong takes no other with it."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            status = os.fstat(file.fileno())
            lines = file.read().splitlines()
    except OSError as error:
        return (), [f"cannot read the API keys in {path}: {error.strerror}"]
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) or status.st_uid not in (0, os.geteuid()):
        return (), [f"{path}: others can write to this file of API keys (chown it, chmod 600)"]
    keys: list[Key] = []
    problems: list[str] = []
    for number, line in enumerate(lines, 1):
        tenant, _, digest = line.strip().partition(" ")
        if not tenant or tenant.startswith("#"):
            continue
        if _TENANT.fullmatch(tenant) and _DIGEST.fullmatch(digest.strip()):
            keys.append(Key(tenant, bytes.fromhex(digest.strip())))
        else:
            problems.append(f"{path}, line {number}: not a tenant and the SHA-256 of a key in hex")
    return tuple(keys), problems
