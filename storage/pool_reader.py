"""Pages of a pool file that an engine may have locked, or nobody: read by pread, nothing is changed."""

import os
import threading
from pathlib import Path

import xxhash

from storage.pool_header import PoolHeader
from storage.pool_make import as_pool_error, read_header
from storage.records import PageEntry


class PoolReader:
    """Any number of threads may ask."""

    def __init__(self, path: Path) -> None:
        """Raises PoolError for what is no usable pool file."""
        with as_pool_error(path, "read"):
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                self.header: PoolHeader = read_header(self._fd)
            except BaseException:
                os.close(self._fd)
                raise
        self._scratch = threading.local()

    def page_ok(self, page: int, entry: PageEntry) -> bool:
        """Whether the bytes of a host page have the published checksum."""
        if not 0 <= page < self.header.num_pages:
            return False
        buffer = self._buffer()
        try:
            read = os.preadv(self._fd, [buffer], self.header.data_offset + page * self.header.page_bytes)
        except OSError:
            return False
        return read == self.header.page_bytes and xxhash.xxh3_64_intdigest(buffer) == entry.checksum

    def _buffer(self) -> bytearray:
        """One for each thread: reading and hashing run beside each other, without the interpreter's lock."""
        try:
            buffer: bytearray = self._scratch.page
        except AttributeError:
            buffer = self._scratch.page = bytearray(self.header.page_bytes)
        return buffer

    def close(self) -> None:
        os.close(self._fd)
