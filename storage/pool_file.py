"""The pool file: KV pages of one engine on disk, locked for the engine's life (DESIGN.md 6 of the design; DESIGN.md here).

Everything is read and written through the descriptor, so that a bad or full disk is a PoolError and not a SIGBUS. The mapping is
read-only: it serves the checksum, which is taken of the bytes where they landed, and readers.
"""

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import secrets
import stat
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, cast

import numpy as np
import xxhash

from storage import pool_header
from storage.errors import PoolError, PoolLocked
from storage.failpoints import hit
from storage.pool_header import NotAPool, PoolHeader
from storage.store_file import sync_directory

PageBytes = np.ndarray[Any, np.dtype[np.uint8]]
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


_DISK = Disk()


class PoolFile:
    """Open by ``PoolFile.open`` only. Calls on different pages may run in different threads."""

    def __init__(self, path: Path, fd: int, header: PoolHeader, disk: Disk, replaced: str | None) -> None:
        self.path = path
        self.header = header
        self.poisoned = False  #: an fdatasync failed: what is on disk is unknown for good
        self.replaced = replaced  #: why an earlier file was given up, None when it was not
        self._fd = fd
        self._disk = disk
        self._map = mmap.mmap(fd, header.file_bytes, mmap.MAP_SHARED, mmap.PROT_READ)
        self._map.madvise(mmap.MADV_DONTFORK)  # a forked child would keep the pages, and the lock with the descriptor
        self._map.madvise(mmap.MADV_DONTDUMP)  # core files must not carry what users wrote

    @classmethod
    def open(
        cls,
        path: Path,
        *,
        num_pages: int,
        page_shape: tuple[int, ...],
        dtype: str,
        model_fingerprint: str,
        lock_wait: float = 0,
        disk: Disk = _DISK,
    ) -> Self:
        """Lock the pool at ``path``; reuse it if geometry and model fit, else make a new one (new pool id) in its place.

        ``lock_wait`` seconds: a killed engine may still be unmapping. Raises PoolLocked, PoolError.
        """
        wanted, head = pool_header.build(
            pool_id=secrets.token_hex(16),
            model_fingerprint=model_fingerprint,
            num_pages=num_pages,
            page_shape=page_shape,
            dtype=dtype,
        )
        until = time.monotonic() + lock_wait
        with _as_pool_error(path, "open"):
            refuse_network(path.parent)
            while True:
                old = _open_locked(path, until)
                header, why = (None, None) if old is None else _reusable(old, path, wanted)
                if old is not None and header is not None:
                    return cls(path, old, header, disk, None)
                try:
                    fd = _make(path, wanted, head, replace=old is not None, disk=disk)
                finally:
                    if old is not None:
                        os.close(old)
                if fd is not None:
                    return cls(path, fd, wanted, disk, why)

    @property
    def pool_id(self) -> str:
        return self.header.pool_id

    @property
    def num_pages(self) -> int:
        return self.header.num_pages

    @property
    def page_bytes(self) -> int:
        return self.header.page_bytes

    def write_page(self, page: int, data: memoryview | PageBytes) -> int:
        """Write one whole page; the xxh3-64 of the bytes as they then stand in the file. Raises PoolError (EIO, ENOSPC)."""
        source = memoryview(cast(Any, data)).cast("B")
        if source.nbytes != self.page_bytes:
            raise ValueError(f"a page has {self.page_bytes} bytes, got {source.nbytes}")
        start = self._offset(page)
        half = self.page_bytes // 2
        with _as_pool_error(self.path, f"write page {page}"):
            hit("pool.before_write")
            self._write(source[:half], start)
            hit("pool.mid_write")
            self._write(source[half:], start + half)
            hit("pool.after_write")
        return self._mapped_checksum(start)

    def zero_page(self, page: int) -> None:
        """Nothing of what a page held stays in the file."""
        with _as_pool_error(self.path, f"zero page {page}"):
            self._write(memoryview(bytes(self.page_bytes)), self._offset(page))

    def read_page(self, page: int, out: PageBytes) -> int:
        """Fill ``out`` (uint8, page_bytes long) by pread; the xxh3-64 of what was read. Raises PoolError (EIO, short file)."""
        target = memoryview(cast(Any, out)).cast("B")
        if target.nbytes != self.page_bytes:
            raise ValueError(f"a page has {self.page_bytes} bytes, the buffer {target.nbytes}")
        offset = self._offset(page)
        done = 0
        with _as_pool_error(self.path, f"read page {page}"):
            while done < self.page_bytes:
                count = self._disk.preadv(self._fd, [target[done:]], offset + done)
                if count == 0:
                    raise PoolError(f"{self.path} ends inside page {page}", "somebody cut the file; stop the engine")
                done += count
        return xxhash.xxh3_64_intdigest(target)

    def sync(self, pages: Iterable[int]) -> None:
        """Pages to the disk, all at once. After one failure never again: a second call would report success for nothing."""
        if self.poisoned:
            raise PoolError(f"{self.path} failed to reach the disk earlier", "checkpointing stays off until a restart")
        if not list(pages):
            return
        hit("pool.before_sync")
        with _as_pool_error(self.path, "sync"):
            try:
                self._disk.fdatasync(self._fd)
            except OSError:
                self.poisoned = True
                raise

    def close(self) -> None:
        """Gives up the lock. Twice is once."""
        if self._fd >= 0:
            self._map.close()
            os.close(self._fd)
            self._fd = -1

    def _offset(self, page: int) -> int:
        if not 0 <= page < self.num_pages:
            raise IndexError(f"page {page} of a pool of {self.num_pages}")
        return self.header.data_offset + page * self.page_bytes

    def _write(self, source: memoryview, offset: int) -> None:
        write_all(self._disk, self._fd, source, offset)

    def _mapped_checksum(self, start: int) -> int:
        with memoryview(self._map) as view, view[start : start + self.page_bytes] as page:
            return int(xxhash.xxh3_64_intdigest(page))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_pool_header(path: Path) -> PoolHeader:
    """Without the lock, for ``recover`` and ``verify``. Raises PoolError."""
    with _as_pool_error(path, "read"):
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            return _read_header(fd)
        finally:
            os.close(fd)


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


def _read_header(fd: int) -> PoolHeader:
    size = os.fstat(fd).st_size
    length = pool_header.header_length(os.pread(fd, 8, 0), size)
    return pool_header.parse(os.pread(fd, length, 8), size)


def _reusable(fd: int, path: Path, wanted: PoolHeader) -> tuple[PoolHeader | None, str | None]:
    """The header if its pages can be used as they are, else why not. Closes ``fd`` when it raises."""
    try:
        found = _read_header(fd)
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
            if _lock(fd) and is_still_at(fd, path):  # else somebody put another file there while we waited
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


def is_still_at(fd: int, path: Path) -> bool:
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
def _as_pool_error(path: Path, what: str) -> Any:
    try:
        yield
    except OSError as error:
        raise PoolError(f"cannot {what}: {path}: {error.strerror or error}", _HINTS.get(error.errno or 0, "")) from error


_HINTS = {
    errno.ENOSPC: "the disk is full: free space",
    errno.EIO: "the disk has errors: see the kernel log",
    errno.ELOOP: "symbolic links are refused: name the file itself",
    errno.ENOENT: "the directory must be there",
    errno.EACCES: "check who owns the data directory",
}
