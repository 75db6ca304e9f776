"""Large memory of zeros, in huge pages where the kernel has them.

A pool of gigabytes in pages of 4 KiB costs a fault for each when it is made, and as many steps when the process ends: between a
kill and the next token both are waited for. In pages of 2 MiB there are 512 times fewer.
"""

import contextlib
import mmap
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt

_PART = 256 << 20  #: bytes that a thread asks the kernel for at a time; zeroing them takes some 30 ms


def zeros(num_bytes: int, threads: int) -> npt.NDArray[np.uint8]:
    """``num_bytes`` (at least 1) of zeros, uint8 [num_bytes], all of them in memory already. Raises MemoryError, OSError.

    In memory: whoever asks for more than there is shall hear of it now, and not lose a process in the middle of its work.
    """
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError, AttributeError):  # a kernel without them; not Linux
        memory.madvise(mmap.MADV_HUGEPAGE)
    array = np.frombuffer(memory, np.uint8)
    starts = range(0, num_bytes, _PART)
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(lambda start: array[start : start + _PART : mmap.PAGESIZE].fill(0), starts))
    return array
