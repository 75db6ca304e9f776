"""How kernels are compiled and cached on disk.

Numba invalidates a cached kernel when the file that holds it changes, not when a helper it inlines from another file does. So
the cache folder is named by a hash of all the kernels' sources: stale machine code cannot be found, and several installed
versions do not meet.

Threads: numba's OpenMP layer binds to the system's libgomp (Debian's libgomp1) where there is one, torch to the one that it brings:
two pools, of which one works at a time. A fused forward pass is a single parallel region, so what it costs to wake a pool is paid
once for each call; without a libgomp numba's own pool does it.
"""

import os
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import numba
import numpy as np
import numpy.typing as npt
import torch

from engine import sources
from engine.errors import CacheFolderUnusable

__all__ = ["F32", "I32", "I64", "inline", "kernel", "torch", "use_threads"]

if numba.config.THREADING_LAYER == "default":  # else the user chose one by NUMBA_THREADING_LAYER
    numba.config.THREADING_LAYER_PRIORITY = ["omp", "workqueue", "tbb"]

F32 = npt.NDArray[np.float32]
I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]

_Function = TypeVar("_Function", bound=Callable[..., Any])


def kernel(*, parallel: bool = False) -> Callable[[_Function], _Function]:
    """Compile at the first call, cache on disk, release the GIL. IEEE arithmetic as written: no fast-math, ever."""

    def decorate(function: _Function) -> _Function:
        before = numba.config.CACHE_DIR
        numba.config.CACHE_DIR = str(_cache_folder())
        try:
            compiled: _Function = numba.njit(cache=True, nogil=True, parallel=parallel, error_model="numpy")(function)
        finally:
            numba.config.CACHE_DIR = before
        return compiled

    return decorate


def inline(function: _Function) -> _Function:
    """A helper that kernels call; compiled into them."""
    compiled: _Function = numba.njit(nogil=True, error_model="numpy")(function)
    return compiled


def use_threads(threads: int) -> None:
    """Let kernels called by this thread take ``threads`` threads (the setting is per thread); the results do not depend on it."""
    numba.set_num_threads(min(threads, numba.config.NUMBA_NUM_THREADS))


@cache
def _cache_folder() -> Path:
    """Raises CacheFolderUnusable in the words that numba, which looks for other folders then, does not find."""
    root = os.environ.get("NUMBA_CACHE_DIR") or f"{os.environ.get('XDG_CACHE_HOME') or Path.home() / '.cache'}/midsentence/kernels"
    folder = Path(root) / sources.digest("kernels/*.py")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise CacheFolderUnusable(
            f"compiled kernels cannot be kept in {folder}: {error.strerror}",
            "set XDG_CACHE_HOME to a directory that can be written to",
        ) from error
    return folder
