"""Sealed pages to the host pool and back: the order of durable writes, and the check before anything is used again.

The step loop owns this object. One thread copies; it touches bytes, never bookkeeping, and reports completions that the step loop
applies between steps. Tokens never wait for pages: what is ready rides in whatever pipeline goes next.
"""

import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from engine.pools import DevicePool, HostPool
from engine.sequence import Sequence as EngineSequence
from recovery.identity import page_identities
from recovery.page_index import HostPage, PageIndex, PageState
from storage.errors import PoolError
from storage.failpoints import hit
from storage.records import PageEntry

#: Holder of a device page while it is being copied: whatever happens to its Sequence, the page is not used again before the copy
#: completes. Otherwise the checksum of another Sequence's bytes would verify for ever.
COPY = "copy"


class SyncedBacking(Protocol):
    """The pool file as the checkpointer sees it."""

    @property
    def poisoned(self) -> bool: ...

    def write_page(self, page: int, data: np.ndarray) -> int: ...

    def read_page(self, page: int, out: np.ndarray) -> int: ...

    def sync(self, pages: Sequence[int]) -> None: ...


@dataclass(frozen=True, slots=True)
class CheckpointConfig:
    page_size: int
    prefill_chunk: int
    sync: bool = False  #: fdatasync before an entry is published (durability "machine")
    reserve: int = 32  #: free host pages kept ready, so that no seal waits for an entry to be dropped


@dataclass(slots=True)
class CheckpointStats:
    pages_written: int = 0
    pages_restored: int = 0
    pages_unbacked: int = 0  #: sealed, but no free host page: recomputed after a crash
    copies_failed: int = 0
    verify_failures: int = 0
    evictions: int = 0


@dataclass(slots=True)
class _Pages:
    """A Sequence's page identities so far, and whether its new pages may be published."""

    root: str
    identities: list[str] = field(default_factory=list)
    publishes: bool = True


@dataclass(frozen=True, slots=True)
class _Completion:
    device_page: int
    host_page: HostPage
    checksum: int
    error: Exception | None = None


class Checkpointer:
    """An ``engine.core.PageBackup`` over a host pool whose entries live in the job store."""

    def __init__(
        self,
        device: DevicePool,
        host: HostPool,
        backing: SyncedBacking,
        table: dict[int, PageEntry],
        config: CheckpointConfig,
        *,
        on_problem: Callable[[str, str], None],
        on_copied: Callable[[], None],
        on_death: Callable[[BaseException], None],
    ) -> None:
        self._device = device
        self._backing = backing
        self._config = config
        self._on_problem = on_problem
        self._on_copied = on_copied
        self._on_death = on_death
        self.index = PageIndex(host.manager, table)
        self.stats = CheckpointStats()
        self._sequences: dict[str, _Pages] = {}
        self._drop: list[int] = list(self.index.stale)
        self._ready: list[HostPage] = []
        self._copies: queue.SimpleQueue[tuple[int, np.ndarray, HostPage] | None] = queue.SimpleQueue()
        self._completions: queue.SimpleQueue[_Completion] = queue.SimpleQueue()
        self._in_flight = 0
        self._scratch = np.empty(host.geometry.page_bytes, dtype=np.uint8)
        self._thread = threading.Thread(target=self._copy_loop, name="checkpoint-copy", daemon=True)
        self._thread.start()

    # --- the engine's side (PageBackup) -------------------------------------------------------------------------------

    def enter(self, sequence_id: str, root: str, *, publishes: bool = True) -> None:
        """Say by which root a Sequence's pages are known. ``publishes=False``: it began under another arithmetic than ours."""
        self._sequences[sequence_id] = _Pages(root, publishes=publishes)

    def leave(self, sequence_id: str) -> None:
        """The Sequence is gone from the engine; its published pages stay, as cache."""
        if self._sequences.pop(sequence_id, None) is not None:
            self.index.release(sequence_id)

    def restore(self, sequence: EngineSequence, pages: Sequence[int]) -> int:
        """Read the leading pages back, each verified in a scratch page before it touches a live one, up to the first that fails."""
        known = self._identities(sequence, len(pages) * self._config.page_size)
        for restored, (identity, device_page) in enumerate(zip(known, pages, strict=False)):
            host_page = self.index.find(identity)
            if host_page is None or host_page.state not in (PageState.FILLED, PageState.PUBLISHED):
                return restored
            if not self._verified(host_page):
                return restored
            self._device.load_page(device_page, self._scratch)
            self.index.hold(host_page, sequence.id)
            self.stats.pages_restored += 1
        return min(len(known), len(pages))

    def sealed(self, sequence: EngineSequence, index: int, page: int) -> None:
        pages = self._sequences.get(sequence.id)
        if pages is None or not pages.publishes or self._backing.poisoned:
            return
        identity = self._identities(sequence, (index + 1) * self._config.page_size)[index]
        host_page = self.index.find(identity)
        if host_page is None:
            host_page = self.index.take(identity)
            if host_page is None:
                self.stats.pages_unbacked += 1
                return
            self._device.manager.share([page], COPY)
            self._in_flight += 1
            self._copies.put((page, self._device.page_bytes_of(page), host_page))
        self.index.hold(host_page, sequence.id)

    # --- between steps ------------------------------------------------------------------------------------------------

    def collect(self) -> None:
        """Apply what the copy thread completed; make room for what comes."""
        while True:
            try:
                done = self._completions.get_nowait()
            except queue.Empty:
                break
            self._in_flight -= 1
            self._device.manager.free([done.device_page], owner=COPY)
            if done.error is None:
                self.index.filled(done.host_page, done.checksum)
                self._ready.append(done.host_page)
                self.stats.pages_written += 1
            else:
                self.index.failed(done.host_page)
                self.stats.copies_failed += 1
                self._on_problem("checkpoint_failed", str(done.error))
        short = self._config.reserve - self.index.free_count - self.index.num_dropping
        if short > 0:
            victims = self.index.evict(short)
            self.stats.evictions += len(victims)
            self._drop += [victim.page for victim in victims]

    def take_writes(self) -> tuple[dict[int, PageEntry], tuple[int, ...]]:
        """Entries to publish and host pages whose entries to drop, for the next pipeline. Give them back to ``written``."""
        publish = {page.page: PageEntry(page.identity, page.checksum) for page in self._ready if page.state is PageState.FILLED}
        drop = tuple(self._drop)
        self._ready, self._drop = [], []
        return publish, drop

    def written(self, publish: dict[int, PageEntry], drop: Sequence[int]) -> None:
        """The store answered: these entries are durable, those are gone."""
        for entry in publish.values():
            page = self.index.find(entry.identity)
            if page is not None:
                self.index.published(page)
        for page_id in drop:
            self.index.dropped(page_id)

    def not_written(self, publish: dict[int, PageEntry], drop: Sequence[int]) -> None:
        """The store refused the whole pipeline (we were declared dead): they ride in a later one. Both may be sent twice."""
        pages = [self.index.find(entry.identity) for entry in publish.values()]
        self._ready += [page for page in pages if page is not None and page.state is PageState.FILLED]
        self._drop += drop

    @property
    def in_flight(self) -> int:
        """Copies not yet collected."""
        return self._in_flight

    @property
    def has_writes(self) -> bool:
        return bool(self._ready or self._drop)

    def close(self) -> None:
        """Let the copy thread end after what is queued."""
        self._copies.put(None)
        self._thread.join()

    # --- internals ----------------------------------------------------------------------------------------------------

    def _identities(self, sequence: EngineSequence, num_tokens: int) -> list[str]:
        pages = self._sequences[sequence.id]
        if len(pages.identities) * self._config.page_size < num_tokens:
            pages.identities = page_identities(
                pages.root,
                sequence.tokens,
                sequence.num_prompt,
                page_size=self._config.page_size,
                prefill_chunk=self._config.prefill_chunk,
                known=pages.identities,
            )
        return pages.identities

    def _verified(self, host_page: HostPage) -> bool:
        """Read the page into the scratch page; True when its checksum is the one that was published."""
        try:
            checksum = self._backing.read_page(host_page.page, self._scratch)
            problem = "" if checksum == host_page.checksum else "checksum differs"
        except PoolError as error:
            problem = str(error)
        if not problem:
            return True
        self.stats.verify_failures += 1
        self._on_problem("page_verify_failed", f"host page {host_page.page}: {problem}; it is recomputed")
        self.index.condemn(host_page)
        self._drop.append(host_page.page)
        return False

    def _copy_loop(self) -> None:
        try:
            while (job := self._copies.get()) is not None:
                self._completions.put(self._copy(*job))
                self._on_copied()
        except BaseException as error:  # a dead copy thread would leave pages pinned for ever: end the process instead
            self._on_death(error)

    def _copy(self, device_page: int, data: np.ndarray, host_page: HostPage) -> _Completion:
        hit("pages.before_copy")
        try:
            checksum = self._backing.write_page(host_page.page, data)
            if self._config.sync:
                self._backing.sync([host_page.page])
        except PoolError as error:
            return _Completion(device_page, host_page, 0, error)
        hit("pages.after_copy")
        return _Completion(device_page, host_page, checksum)
