"""The pool file: KV pages of one engine on disk, locked for the engine's life.

Everything is read and written through the descriptor, so that a bad or full disk is a PoolError and not a SIGBUS. The mapping is
read-only: it serves the checksum, which is taken of the bytes where they landed, and readers.
"""

import mmap
import os
import secrets
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Self, cast

import numpy as np
import xxhash

from storage import pool_header
from storage.errors import PoolError
from storage.failpoints import hit
from storage.pool_header import PoolHeader
from storage.pool_make import DISK, Disk, acquire, as_pool_error, read_header, write_all

PageBytes = np.ndarray[Any, np.dtype[np.uint8]]


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
        disk: Disk = DISK,
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
        with as_pool_error(path, "open"):
            fd, header, replaced = acquire(path, wanted, head, lock_wait=lock_wait, disk=disk)
            return cls(path, fd, header, disk, replaced)

    @property
    def pool_id(self) -> str:
        return self.header.pool_id

    @property
    def num_pages(self) -> int:
        return self.header.num_pages

    @property
    def page_bytes(self) -> int:
        return self.header.page_bytes

    def write_pages(self, first: int, data: memoryview | PageBytes) -> list[int]:
        """Write whole neighbouring pages, from ``first`` on, in one go; the xxh3-64 of each as it then stands in the file.

        Raises PoolError (EIO, ENOSPC): then nothing is known of any of them.
        """
        source = memoryview(cast(Any, data)).cast("B")
        count, start = self._extent(first, source.nbytes)
        half = source.nbytes // 2
        with as_pool_error(self.path, f"write pages {first} to {first + count - 1}"):
            hit("pool.before_write")
            self._write(source[:half], start)
            hit("pool.mid_write")
            self._write(source[half:], start + half)
            hit("pool.after_write")
        return [self._mapped_checksum(start + index * self.page_bytes) for index in range(count)]

    def zero_page(self, page: int) -> None:
        """Nothing of what a page held stays in the file; one that is zeros already is only read. Raises PoolError.

        Written over, not punched out or converted by ``fallocate``: some file systems (XFS) do that by giving the blocks back and
        asking for new ones, and on a full disk the hole would stay. Written over it costs 0.2 ms for 720 KiB, converted 0.16 ms.
        """
        content = np.empty(self.page_bytes, np.uint8)
        self.read_pages(page, content)
        if content.any():
            with as_pool_error(self.path, f"zero page {page}"):
                hit("pool.before_zero")
                self._write(memoryview(bytes(self.page_bytes)), self._offset(page))

    def read_pages(self, first: int, out: PageBytes) -> list[int]:
        """Fill ``out`` (uint8, whole pages long) with neighbouring pages from ``first`` on, by pread; the xxh3-64 of each.

        Raises PoolError (EIO, short file): then ``out`` holds anything.
        """
        target = memoryview(cast(Any, out)).cast("B")
        count, offset = self._extent(first, target.nbytes)
        done = 0
        with as_pool_error(self.path, f"read pages {first} to {first + count - 1}"):
            while done < target.nbytes:
                got = self._disk.preadv(self._fd, [target[done:]], offset + done)
                if got == 0:
                    raise PoolError(
                        f"{self.path} ends inside page {first + done // self.page_bytes}", "somebody cut the file; stop the engine"
                    )
                done += got
        size = self.page_bytes
        return [xxhash.xxh3_64_intdigest(target[index * size : (index + 1) * size]) for index in range(count)]

    def sync(self, pages: Iterable[int]) -> None:
        """Pages to the disk, all at once. After one failure never again: a second call would report success for nothing."""
        if self.poisoned:
            raise PoolError(f"{self.path} failed to reach the disk earlier", "checkpointing stays off until a restart")
        if not list(pages):
            return
        with as_pool_error(self.path, "sync"):
            try:
                hit("pool.before_sync")
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

    def _extent(self, first: int, num_bytes: int) -> tuple[int, int]:
        """How many pages that many bytes are, and where they begin."""
        count, rest = divmod(num_bytes, self.page_bytes)
        if rest or not count:
            raise ValueError(f"a page has {self.page_bytes} bytes, the buffer {num_bytes}")
        self._offset(first + count - 1)
        return count, self._offset(first)

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
    """Without the lock. Raises PoolError."""
    with as_pool_error(path, "read"):
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            return read_header(fd)
        finally:
            os.close(fd)
