"""What all parts of the api share, made once and passed by constructor: settings, model, store, metrics, drain flag."""

import asyncio
import contextlib
import secrets
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

import anyio
from anyio import to_thread
from prometheus_client import CollectorRegistry

from service.metrics import ApiMetrics
from service.tokenization import Tokenization
from storage.errors import StorageError
from storage.job_store import JobStore
from storage.records import EngineRecord, JobStatus

_T = TypeVar("_T")

#: Threads for store calls and for tokenising. A Redis that hangs blocks the first kind until its time-out, never the second.
STORE_THREADS = 32
TOKENIZER_THREADS = 2


@dataclass(frozen=True, slots=True)
class ApiOptions:
    """Times in seconds, sizes in bytes."""

    queue_limit: int = 10_000
    retention_seconds: float = 7 * 86_400.0
    max_body_bytes: int = 8 << 20
    lease_seconds: float = 10.0
    submit_timeout: float = 5.0  #: how long a submission is sent again when its reply was lost
    keep_alive: float = 15.0  #: between comments on a silent stream
    poll_interval: float = 1.0  #: of streams: hints may be lost (PROTOCOL.md 11)
    drain_seconds: float = 0.5  #: after SIGTERM, how long new connections still get their 503 ...
    close_seconds: int = 5  #: ... and then how long answers may take to go out; 20 s in all is the promise
    sweep_interval: float = 1.0
    max_purges: int = 100  #: for each sweep


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The model this api makes jobs for. ``names``: the first is shown, all are accepted."""

    names: tuple[str, ...]
    fingerprint: str
    tokenization: Tokenization
    created: int = 0  #: seconds since the epoch, for ``/v1/models``

    @property
    def name(self) -> str:
        return self.names[0]


#: Opens the store or answers with the open one. Raises StorageError while Redis is away or is not our store.
StoreSource = Callable[[], JobStore]


class StoreCalls:
    """Synchronous store calls, in threads of their own. A call that was begun runs to its end, whatever happens to the caller."""

    def __init__(self, source: StoreSource, metrics: ApiMetrics) -> None:
        self.source = source
        self._metrics = metrics
        self._limiter: anyio.CapacityLimiter | None = None

    async def run(self, call: Callable[[JobStore], _T]) -> _T:
        """Raises what ``storage.errors`` names."""
        if self._limiter is None:  # a limiter belongs to the running event loop
            self._limiter = anyio.CapacityLimiter(STORE_THREADS)
        return await to_thread.run_sync(self.run_here, call, limiter=self._limiter, abandon_on_cancel=True)

    def run_here(self, call: Callable[[JobStore], _T]) -> _T:
        """The same, in a thread that the caller owns."""
        try:
            return call(self.source())
        except StorageError as error:
            self._metrics.store_errors.labels(type(error).__name__).inc()
            raise


@dataclass(frozen=True, slots=True)
class StoreView:
    """What the sweep saw of the store at ``at`` (monotonic seconds). Replaced whole, so that any thread may read it."""

    at: float
    error: StorageError | None = None
    engines: tuple[EngineRecord, ...] = ()
    living: frozenset[str] = frozenset()
    counts: dict[JobStatus, int] = field(default_factory=dict)

    def age(self) -> float:
        return time.monotonic() - self.at


class Drain:
    """Set once, at SIGTERM. Streams wait on their own wake-ups, so each registers one."""

    def __init__(self) -> None:
        self.draining = False
        self._wake_ups: set[asyncio.Event] = set()

    def begin(self) -> None:
        """From the event loop only."""
        self.draining = True
        for wake_up in self._wake_ups:
            wake_up.set()

    @contextlib.contextmanager
    def waking(self, wake_up: asyncio.Event) -> Iterator[None]:
        self._wake_ups.add(wake_up)
        try:
            yield
        finally:
            self._wake_ups.discard(wake_up)


class Context:
    """One api process. ``incarnation`` names this life of it."""

    def __init__(self, model: ServedModel, source: StoreSource, options: ApiOptions, registry: CollectorRegistry) -> None:
        self.model = model
        self.options = options
        self.registry = registry
        self.metrics = ApiMetrics(registry)
        self.store = StoreCalls(source, self.metrics)
        self.drain = Drain()
        self.incarnation = secrets.token_hex(16)
        self.view: StoreView | None = None  #: None before the first sweep
        self._tokenizer_limiter: anyio.CapacityLimiter | None = None

    async def in_tokenizer_thread(self, work: Callable[[], _T]) -> _T:
        if self._tokenizer_limiter is None:
            self._tokenizer_limiter = anyio.CapacityLimiter(TOKENIZER_THREADS)
        return await to_thread.run_sync(work, limiter=self._tokenizer_limiter, abandon_on_cancel=True)

    def engines_of_model(self) -> tuple[EngineRecord, ...]:
        """Engines of our model that are not known to be dead, as last seen."""
        engines: Iterable[EngineRecord] = self.view.engines if self.view is not None else ()
        return tuple(engine for engine in engines if not engine.dead and engine.info.model_fingerprint == self.model.fingerprint)
