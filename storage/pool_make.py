"""Opening and making a pool file: who holds the lock, whether what is there can be used, and a new one put in its place whole."""

import contextlib
import ctypes
import errno
import fcntl
import os
import secrets
import stat
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from storage import pool_header
from storage.errors import PoolError, PoolLocked
from storage.pool_header import NotAPool, PoolHeader
from storage.store_file import sync_directory

_TOUCH = 8 << 20
_RETRY = 0.05
#: f_type of file systems whose locks or mappings are not those of one machine.
_NETWORK = {
    0x6969: "NFS", 0x517B: "SMB", 0xFF534D42: "CIFS", 0xFE534D42: "SMB2", 0x01021997: "9P", 0x5346414F: "AFS",
    0x00C36400: "Ceph", 0x0BD00BD0: "Lustre", 0x47504653: "GPFS", 0x7461636F: "OCFS2", 0x01161970: "GFS2",
    0x19830326: "BeeGFS",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Disk:
    """The system calls that can fail for reasons of the disk, so that a test can make them fail."""

    pwrite: Callable[[int, Any, int], int] = os.pwrite
    preadv: Callable[[int, Any, int], int] = os.preadv
    fallocate: Callable[[int, int, int], None] = os.posix_fallocate
    fdatasync: Callable[[int], None] = os.fdatasync


DISK = Disk()


def acquire(path: Path, wanted: PoolHeader, head: bytes, *, lock_wait: float, disk: Disk) -> tuple[int, PoolHeader, str | None]:
    """A locked descriptor, the header in force, and why an earlier file was given up (None when none was)."""
    until = time.monotonic() + lock_wait
    refuse_network(path.parent)
    while True:
        old = _open_locked(path, until)
        header, why = (None, None) if old is None else _reusable(old, path, wanted)
        if old is not None and header is not None:
            return old, header, None
        try:
            fd = _make(path, wanted, head, replace=old is not None, disk=disk)
        finally:
            if old is not None:
                os.close(old)
        if fd is not None:
            return fd, wanted, why


def write_all(disk: Disk, fd: int, source: memoryview, offset: int) -> None:
    done = 0
    while done < source.nbytes:
        done += disk.pwrite(fd, source[done:], offset + done)


def refuse_network(directory: Path) -> None:
    """Locks of a network file system do not keep a second machine out, and its mappings are not coherent."""
    buffer = ctypes.create_string_buffer(512)
    if ctypes.CDLL(None, use_errno=True).statfs(os.fsencode(directory), buffer) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(directory))
    kind = int.from_bytes(buffer.raw[: ctypes.sizeof(ctypes.c_long)], "little") & 0xFFFFFFFF
    if kind in _NETWORK:
        raise PoolError(f"{directory} is on {_NETWORK[kind]}, a network file system", "use a data directory on a local disk")


def read_header(fd: int) -> PoolHeader:
    size = os.fstat(fd).st_size
    length = pool_header.header_length(os.pread(fd, 8, 0), size)
    return pool_header.parse(os.pread(fd, length, 8), size)


def _reusable(fd: int, path: Path, wanted: PoolHeader) -> tuple[PoolHeader | None, str | None]:
    """The header if its pages can be used as they are, else why not. Closes ``fd`` when it raises."""
    try:
        found = read_header(fd)
        os.fchmod(fd, 0o600)
    except NotAPool as error:
        os.close(fd)
        raise NotAPool(f"{path}: {error.message}", error.hint) from error
    except PoolError as error:
        return None, error.message
    except BaseException:
        os.close(fd)
        raise
    why = found.differs_from(wanted)
    return (None, why) if why else (found, None)


def _open_locked(path: Path, until: float) -> int | None:
    """The file at ``path``, locked; None when there is none."""
    while True:
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            return None
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise PoolError(f"{path} is not a regular file", "move it away")
            if _lock(fd) and _is_still_at(fd, path):  # else somebody put another file there while we waited
                return fd
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)
        if time.monotonic() >= until:
            raise PoolLocked(f"another process uses {path}", "stop that engine, or use another data directory")
        time.sleep(_RETRY)


def _lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_still_at(fd: int, path: Path) -> bool:
    try:
        there = os.stat(path, follow_symlinks=False)
    except FileNotFoundError:
        return False
    ours = os.fstat(fd)
    return (ours.st_dev, ours.st_ino) == (there.st_dev, there.st_ino)


def _make(path: Path, header: PoolHeader, head: bytes, *, replace: bool, disk: Disk) -> int | None:
    """A complete pool, locked, put at ``path``; None when another process was faster. Leaves no temporary file behind."""
    _remove_stale(path)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    kept = False
    try:
        os.fchmod(fd, 0o600)
        if _lock(fd):
            _fill(fd, path, header, head, disk)
            kept = _put(temporary, path, replace=replace)
    finally:
        if not kept:
            os.close(fd)
        temporary.unlink(missing_ok=True)
    sync_directory(path.parent)
    return fd if kept else None


def _fill(fd: int, path: Path, header: PoolHeader, head: bytes, disk: Disk) -> None:
    """All blocks taken (a sparse file is a SIGBUS on a full disk) and touched once (first writes are ten times slower)."""
    free = os.statvfs(path.parent).f_bavail * os.statvfs(path.parent).f_frsize
    full = PoolError(
        f"{path} needs {header.file_bytes} bytes, {path.parent} has {free} free", "free space, or use fewer --host-pages"
    )
    if free < header.file_bytes:
        raise full
    try:
        disk.fallocate(fd, 0, header.file_bytes)
        write_all(disk, fd, memoryview(head), 0)
        zeros = memoryview(bytes(_TOUCH))
        for offset in range(header.data_offset, header.file_bytes, _TOUCH):
            write_all(disk, fd, zeros[: header.file_bytes - offset], offset)
        os.fsync(fd)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise full from error
        raise


def _put(temporary: Path, path: Path, *, replace: bool) -> bool:
    """Over the file whose lock we hold, or where none is; a link, for a rename would put out of its file who came first."""
    if replace:
        os.replace(temporary, path)
        return True
    try:
        os.link(temporary, path)
    except (FileExistsError, FileNotFoundError):  # somebody was faster, or took ours for a stale one
        return False
    return True


def _remove_stale(path: Path) -> None:
    """Half-made pools of processes that died: those that nobody has locked."""
    for stale in path.parent.glob(f".{path.name}.*.tmp"):
        with contextlib.suppress(OSError):
            fd = os.open(stale, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                if _lock(fd):
                    stale.unlink()
            finally:
                os.close(fd)


@contextlib.contextmanager
def as_pool_error(path: Path, what: str) -> Iterator[None]:
    try:
        yield
    except PoolError:
        raise
    except OSError as error:
        raise PoolError(f"cannot {what}: {path}: {error.strerror or error}", _HINTS.get(error.errno or 0, "")) from error


_HINTS = {
    errno.ENOSPC: "the disk is full: free space",
    errno.EIO: "the disk has errors: see the kernel log",
    errno.ELOOP: "symbolic links are refused: name the file itself",
    errno.ENOENT: "the directory must be there",
    errno.EACCES: "check who owns the data directory",
}
