"""What all parts of the api share, made once and passed by constructor: settings, model, store, metrics, drain flag."""

import asyncio
import contextlib
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

import anyio
from anyio import to_thread
from prometheus_client import CollectorRegistry

from service.api.problems import TooManyStreams
from service.api.rates import Rates
from service.api.timeline import Timeline
from service.api_keys import ApiKeys
from service.metrics import ApiMetrics
from service.tokenization import Tokenization
from service.tracing import Tracing
from storage.errors import StorageError, StoreFull, StoreMisconfigured, StoreUnavailable, WrongStore
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
    max_prompt_chars: int = 1 << 20
    max_file_bytes: int = 200 << 20
    max_files_bytes: int = 1 << 30  #: of all files together
    batch_window: int = 256  #: lines of a batch under way at once
    tenant_queue_limit: int | None = None
    tenant_streams: int = 1000
    tenant_requests_per_minute: int | None = None
    tenant_tokens_per_minute: int | None = None
    lease_seconds: float = 10.0
    api_lease_seconds: float = 60.0  #: after which a silent api's plain jobs are cancelled; its beats cost an fsync each
    submit_timeout: float = 5.0  #: how long a submission is sent again when its reply was lost
    keep_alive: float = 15.0  #: between comments on a silent stream
    poll_interval: float = 1.0  #: of streams: hints may be lost (PROTOCOL.md 11)
    drain_seconds: float = 0.5  #: after SIGTERM, how long new connections still get their 503 ...
    close_seconds: int = 5  #: ... and then how long answers may take to go out; 20 s in all is the promise
    idle_seconds: float = 5.0  #: how long an api that was replaced keeps connections on which nothing is asked ...
    retire_seconds: float = 600.0  #: ... and how long it may take over answers that no other could go on with
    sweep_interval: float = 1.0
    max_purges: int = 100  #: for each sweep
    overview_seconds: float = 600.0  #: after which a viewer has to come again, with a key that is still good
    rewrite_interval: float = 600.0  #: between two rewrites of Redis's file after purges: each writes all that is kept


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
        for kind in (StoreUnavailable, StoreFull, StoreMisconfigured, WrongStore):
            metrics.store_errors.labels(kind.__name__)  # a series that begins with its first error shows no rise
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
    """How far this process is on its way out. Only forward: serving, maybe ``retiring``, ``draining``.

    Streams wait on their own wake-ups, so each registers one.
    """

    def __init__(self) -> None:
        self.retiring = False  #: another api has the port: what can be resumed there ends, everything else is answered
        self.draining = False  #: everything ends
        self._wake_ups: set[asyncio.Event] = set()

    def retire(self) -> None:
        """From the event loop only."""
        self.retiring = True
        self._wake_all()

    def begin(self) -> None:
        """From the event loop only."""
        self.draining = True
        self._wake_all()

    def ends(self, *, resumable: bool) -> bool:
        """Whether a stream must end now."""
        return self.draining or (self.retiring and resumable)

    def _wake_all(self) -> None:
        for wake_up in self._wake_ups:
            wake_up.set()

    @contextlib.contextmanager
    def waking(self, wake_up: asyncio.Event) -> Iterator[None]:
        self._wake_ups.add(wake_up)
        try:
            yield
        finally:
            self._wake_ups.discard(wake_up)


class StreamSlots:
    """Places for readers of logs: each costs a connection and some memory for as long as it stays."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._taken: Counter[str] = Counter()

    @contextlib.contextmanager
    def one_for(self, tenant: str) -> Iterator[None]:
        """Raises TooManyStreams."""
        if self._taken[tenant] >= self._limit:
            raise TooManyStreams(f"{self._limit} streams are open already (--tenant-streams): end some, or try again later")
        self._taken[tenant] += 1
        try:
            yield
        finally:
            self._taken[tenant] -= 1


class Context:
    """One api process. ``incarnation`` names this life of it; without ``keys`` nobody is asked for one."""

    def __init__(
        self,
        model: ServedModel,
        source: StoreSource,
        options: ApiOptions,
        registry: CollectorRegistry,
        keys: ApiKeys | None = None,
        tracing: Tracing | None = None,
        kill_engine: Callable[[], None] | None = None,
    ) -> None:
        """``kill_engine``: only where the supervisor shows a demo."""
        self.model = model
        self.tracing = tracing
        self.keys = keys
        self.kill_engine = kill_engine
        self.timeline = Timeline()
        self.options = options
        self.registry = registry
        self.metrics = ApiMetrics(registry)
        self.store = StoreCalls(source, self.metrics)
        self.drain = Drain()
        self.streams = StreamSlots(options.tenant_streams)
        self.rates = Rates(options.tenant_requests_per_minute, options.tenant_tokens_per_minute)
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
