"""Packed weights on disk, so that a model is converted and proved once and mapped ever after.

A folder of ``.npy`` files (their data is aligned for vector loads) and a manifest with the checksum of each. Its name holds all
that the contents and the proof depend on: the model, the number format, our own sources, transformers, the CPU.
"""

import hashlib
import json
import os
import shutil
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash
from llvmlite import binding

from engine import sources
from engine.kernels.llama import Weights
from engine.llama import LlamaWeights
from engine.model_source import build_folder, cache_folder, locked

_MANIFEST = "manifest.json"
_MAPPED_FROM = 1 << 20  #: bytes; smaller arrays are read
_KEPT_UNUSED = 7 * 86_400.0  #: seconds
_SCALARS = ("rope_scale", "epsilon", "scaling")


def folder_for(fingerprint: str, weights: str) -> Path:
    """Where the packed weights of the model with this ``model_source.fingerprint`` belong."""
    depends = [sources.digest("*.py", "kernels/*.py"), version("transformers"), version("torch"), binding.get_host_cpu_name()]
    digest = hashlib.blake2b(json.dumps(depends).encode(), digest_size=8)
    return cache_folder() / "packed" / f"{fingerprint}-{weights}-{digest.hexdigest()}"


def save(folder: Path, llama: LlamaWeights, facts: Mapping[str, Any]) -> None:
    """Write ``folder``, whole or not at all. What other versions of ours packed of this model goes when nobody used it for a week.

    ``facts`` come back from ``load``; they hold what JSON can.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    stem = folder.name.rpartition("-")[0]
    with locked(folder.with_name(f".{stem}.lock")):
        for other in folder.parent.glob(f"{stem}-*"):
            if other != folder and not _used_lately(other / _MANIFEST):
                shutil.rmtree(other)
        if load(folder) is None:  # another process may have been faster
            shutil.rmtree(folder, ignore_errors=True)
            build_folder(folder, lambda scratch: _write(scratch, llama, facts))


def _write(folder: Path, llama: LlamaWeights, facts: Mapping[str, Any]) -> None:
    arrays = {**llama.weights._asdict(), "inv_freq": llama.inv_freq}
    if llama.weights.embedding is llama.weights.head:
        del arrays["embedding"], arrays["embedding_scale"]
    for name, array in arrays.items():
        np.save(folder / f"{name}.npy", array)
    manifest = {
        "checksums": {name: _checksum(array) for name, array in arrays.items()},
        "scalars": {name: getattr(llama, name) for name in _SCALARS},
        "facts": dict(facts),
    }
    (folder / _MANIFEST).write_text(json.dumps(manifest, indent=1))


def load(folder: Path) -> tuple[LlamaWeights, dict[str, Any]] | None:
    """The weights, mapped, and the facts; None where they are not, or not whole: every byte is checked."""
    try:
        manifest = json.loads((folder / _MANIFEST).read_bytes())
        names = list(manifest["checksums"])
        with ThreadPoolExecutor() as threads:
            arrays = dict(
                zip(names, threads.map(lambda name: _read(folder, name, manifest["checksums"][name]), names), strict=True)
            )
        for part in ("embedding", "embedding_scale"):
            arrays.setdefault(part, arrays[part.replace("embedding", "head")])
        inv_freq = arrays.pop("inv_freq")
        os.utime(folder / _MANIFEST)
        return LlamaWeights(Weights(**arrays), inv_freq, **manifest["scalars"]), manifest["facts"]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _used_lately(manifest: Path) -> bool:
    try:
        return time.time() - manifest.stat().st_mtime < _KEPT_UNUSED
    except OSError:
        return False


def _read(folder: Path, name: str, checksum: str) -> npt.NDArray[Any]:
    path = folder / f"{name}.npy"
    # "c": private, and writable to numba, which compiles anew for arrays that are not.
    array = np.asarray(np.load(path, mmap_mode="c" if path.stat().st_size >= _MAPPED_FROM else None, allow_pickle=False))
    if _checksum(array) != checksum:
        raise ValueError(f"{path} is damaged")
    return array


def _checksum(array: npt.NDArray[Any]) -> str:
    return str(xxhash.xxh3_128(np.ascontiguousarray(array).data.cast("B") if array.size else b"").hexdigest())
