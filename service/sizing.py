"""How many pages fit this machine, where the settings leave it open."""

import os
from pathlib import Path

from service.errors import LimitTooLow
from service.settings import MIB, Settings
from storage.errors import PoolError

DEVICE_POOL_SHARE = 4  #: a quarter of the memory ...
DEVICE_POOL_CAP = 1024 * MIB  #: ... but no more: the pool file has twice its size, and is written in full at the first start
DEVICE_SHARE = 85  #: per cent of what the model leaves on an accelerator; the rest is for logits, graphs and the self-test's pages
HOST_PAGES_PER_DEVICE_PAGE = 2
HOST_POOL_DISK_SHARE = 4
MIN_PAGES = 2
_UNLIMITED = 1 << 60  # cgroup v1 writes "no limit" as a huge number, v2 as "max"


def memory_limit() -> int:
    """Bytes of memory this process may use: the machine's, or its control group's where that is less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        try:
            limit = int((Path("/sys/fs/cgroup") / name).read_text())
        except (OSError, ValueError):
            continue
        if limit < _UNLIMITED:
            total = min(total, limit)
    return total


def device_pages(settings: Settings, page_bytes: int, device_free: int | None = None) -> int:
    """Pages of ``page_bytes`` each. ``device_free``: bytes that the model left on an accelerator; None: the pool is in memory."""
    if settings.device_pages is not None:
        return settings.device_pages
    if device_free is not None:
        return max(MIN_PAGES, device_free * DEVICE_SHARE // 100 // page_bytes)
    return max(MIN_PAGES, min(memory_limit() // DEVICE_POOL_SHARE, DEVICE_POOL_CAP) // page_bytes)


def check_device_pages(num_pages: int, page_bytes: int, device_free: int | None = None) -> None:
    """Raises LimitTooLow where so many never fit: to try it would end the process, at each start."""
    room = memory_limit() if device_free is None else device_free
    if (wanted := num_pages * page_bytes) > room:
        raise LimitTooLow(
            f"{num_pages} device pages of {page_bytes // 1024} KiB are {wanted // MIB} MiB; there are {room // MIB}",
            "give fewer --device-pages, or leave it out",
        )


def host_pages(settings: Settings, page_bytes: int, num_device_pages: int, existing: int | None = None) -> int:
    """Pages of the pool file; 0: there is to be none. ``existing``: of the one that is there.

    It keeps its size unless the settings name one: free disk space differs from start to start, and a pool of another size would
    be a new one, without its pages.
    """
    if settings.host_pages is not None:
        return settings.host_pages
    if existing is not None:
        return existing
    wanted = HOST_PAGES_PER_DEVICE_PAGE * num_device_pages
    return max(MIN_PAGES, min(wanted, free_disk(settings.data_dir) // HOST_POOL_DISK_SHARE // page_bytes))


def existing_pages(pool: Path) -> int | None:
    """Pages of the pool file at ``pool``, by its header; None when there is none that can be read (it is then made anew)."""
    from storage.pool_file import read_pool_header  # imports numpy, which the supervisor does without

    try:
        return read_pool_header(pool).num_pages
    except PoolError:
        return None


def free_disk(directory: Path) -> int:
    """Bytes free for us where ``directory`` is, or will be."""
    while not directory.exists():
        directory = directory.parent
    status = os.statvfs(directory)
    return status.f_bavail * status.f_frsize
