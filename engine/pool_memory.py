"""Memory of a device pool on the CPU: of any size at once, and not given back while another process waits to go on with it.

It is a file without a name (``memfd_create``). The kernel finds its memory as it is touched, 0.5 to 2 GB a second; a process that
holds the file when its maker dies finds all of that in place, and nobody waits for gigabytes to be unmapped, given back and
found again. What the pages hold then is what any page holds that was used before: no page table names it.
"""

import contextlib
import ctypes
import mmap
import os
import threading

_NAME = "midsentence-device-pool"
_LOWEST_PRIORITY = 19
_CLAIM_BYTES = 4 << 20
_MADV_POPULATE_WRITE = 23  #: <linux/mman.h>


def make(size: int) -> mmap.mmap:
    """``size`` bytes, all zero. Where the kernel has no files without names, nobody can go on with it."""
    try:
        fd = os.memfd_create(_NAME, os.MFD_CLOEXEC)
    except OSError:
        return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE)
    try:
        os.ftruncate(fd, size)
        return mmap.mmap(fd, size)  # has a descriptor of its own
    finally:
        os.close(fd)


def share(fd: int) -> mmap.mmap:
    """The memory behind ``fd``, which this closes."""
    try:
        return mmap.mmap(fd, 0)
    finally:
        os.close(fd)


def of_process(pid: int) -> int | None:
    """A descriptor of the pool memory of a living process of ours; None when it has none."""
    folder = f"/proc/{pid}/fd"
    with contextlib.suppress(OSError):  # it is just ending, or /proc is not for us
        for name in os.listdir(folder):
            with contextlib.suppress(OSError):  # it has closed that one meanwhile
                link = f"{folder}/{name}"
                if os.readlink(link).startswith(f"/memfd:{_NAME}"):
                    return os.open(link, os.O_RDWR | os.O_CLOEXEC)
    return None


def claim(memory: mmap.mmap) -> None:
    """Have the kernel find and map all of it, from the beginning on, while others compute: on a thread of its own.

    A start need not wait for that, and pages that are restored bring their own. But where there is not enough memory, it should
    show now, and not in hours; and who waits to go on with it should have it mapped by then. Kernels before 5.14 cannot be asked.
    """
    assert threading.current_thread() is not threading.main_thread(), "its priority would be that of everything after"
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST_PRIORITY)  # of this thread alone
    libc, begin = ctypes.CDLL(None), ctypes.addressof(ctypes.c_char.from_buffer(memory))
    for at in range(0, len(memory), _CLAIM_BYTES):
        part = ctypes.c_size_t(min(_CLAIM_BYTES, len(memory) - at))
        if libc.madvise(ctypes.c_void_p(begin + at), part, _MADV_POPULATE_WRITE):
            return
