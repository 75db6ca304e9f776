"""A disk under a real pool file: it can lose or tear what was not synced; it fails; a process may die inside a write."""

import errno
import os
import random
from collections.abc import Callable

from storage.pool_make import Disk

SECTOR = 8  #: bytes that reach the platter together: a quarter of a page, so that pages tear


class SimDisk:
    """``before`` hears of each call, with its offset; it may raise. It belongs to the process that uses the disk now."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._unsynced: list[tuple[int, bytes]] = []  #: offset, what stood there
        self._stuck: list[
            tuple[int, bytes]
        ] = []  #: what a failed sync gave up: no later sync brings it to the disk, unless it is written again
        self.before: Callable[[str, int], None] = untroubled
        self.calls = Disk(pwrite=self._pwrite, preadv=self._preadv, fdatasync=self._fdatasync)

    def _pwrite(self, fd, data, offset):
        self.before("pwrite", offset)
        end = offset + len(data)
        again = [given_up for given_up in self._stuck if given_up[0] < end and offset < given_up[0] + len(given_up[1])]
        self._stuck = [given_up for given_up in self._stuck if given_up not in again]
        self._unsynced += [*again, (offset, os.pread(fd, len(data), offset))]
        return os.pwrite(fd, data, offset)

    def _preadv(self, fd, buffers, offset):
        self.before("preadv", offset)
        return os.preadv(fd, buffers, offset)

    def _fdatasync(self, fd):
        try:
            self.before("fdatasync", 0)
        except OSError:
            self._stuck += self._unsynced
            self._unsynced.clear()
            raise
        self._unsynced.clear()

    def made_anew(self) -> None:
        """The file was just made, and synced as a whole."""
        self._unsynced.clear()
        self._stuck.clear()

    def lose_power(self, path) -> int:
        """Any subset of the sectors that were not synced is as it was at some earlier moment. How many are."""
        lost = 0
        fd = os.open(path, os.O_RDWR)
        try:
            for offset, old in reversed(self._stuck + self._unsynced):
                for at in range(0, len(old), SECTOR):
                    if self._rng.random() < 0.6:
                        os.pwrite(fd, old[at : at + SECTOR], offset + at)
                        lost += 1
        finally:
            os.close(fd)
        self.made_anew()
        return lost


def untroubled(call: str, offset: int) -> None:
    pass


def failed() -> OSError:
    return OSError(errno.EIO, os.strerror(errno.EIO))
