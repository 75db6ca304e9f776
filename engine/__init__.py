"""The engine, in memory: pages, pools, scheduler, model runner, sampler. No Redis; no file but the model's.

Names are loaded on first use: bookkeeping (``PageManager``) must not cost an import of torch, and the api imports
``engine.model_source`` without it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

import engine.threads  # noqa: F401  (before torch is loaded: see there)

if TYPE_CHECKING:
    from engine.cache import PagedKVCache
    from engine.core import Engine, StepResult
    from engine.embedding import PagedInferenceEngine
    from engine.page_manager import PageManager
    from engine.pools import DevicePool, HostPool
    from engine.sampler import SamplingParams
    from engine.sequence import Request, Sequence

_HOMES = {
    "DevicePool": "engine.pools",
    "Engine": "engine.core",
    "HostPool": "engine.pools",
    "PageManager": "engine.page_manager",
    "PagedInferenceEngine": "engine.embedding",
    "PagedKVCache": "engine.cache",
    "Request": "engine.sequence",
    "SamplingParams": "engine.sampler",
    "Sequence": "engine.sequence",
    "StepResult": "engine.core",
}

__all__ = [
    "DevicePool",
    "Engine",
    "HostPool",
    "PageManager",
    "PagedInferenceEngine",
    "PagedKVCache",
    "Request",
    "SamplingParams",
    "Sequence",
    "StepResult",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'engine' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
