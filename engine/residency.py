"""Which pages of which Sequence are where, and how they get there.

A device page is held by the Sequences that have it in their tables, by the prefix cache (``CACHE``) and by copies in flight
(``COPY``); it is free when nobody holds it. What is decided here takes effect between steps; the copies run beside them.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

from engine.cache import PagedKVCache
from engine.copies import Copies, Load, Loaded
from engine.costs import Costs
from engine.eviction import EvictionPolicy
from engine.host_cache import HostCache, HostPage
from engine.identity import page_identities
from engine.prefix_cache import PrefixCache
from engine.promises import Promises
from engine.retention import Retention
from engine.sequence import Restart, Sequence, restart
from engine.stats import PageStats


@dataclass(frozen=True, slots=True)
class Source:
    """Where one leading page of a Sequence is now: on the device, else on the host."""

    device_page: int | None
    host_page: HostPage | None


@dataclass(frozen=True, slots=True)
class Arrived:
    """A Sequence that has its pages, of which the leading ``found`` did not have to be computed."""

    sequence: Sequence
    found: int
    restart: Restart


@dataclass(frozen=True, slots=True)
class Failed:
    """A page of the Sequence did not come in as it was stored: it has left the device again, to be admitted anew."""

    sequence: Sequence


@dataclass(frozen=True, slots=True)
class _Arriving:
    sequence: Sequence
    found: int
    load: Load


class Residency:
    """Page tables, prefix cache, and copies to and from the host pool. The step loop owns it."""

    def __init__(
        self,
        cache: PagedKVCache,
        policy: EvictionPolicy[str],
        *,
        prefill_chunk: int,
        copies: Copies | None = None,
        retention: Retention | None = None,
        reached: Callable[[str], None] = lambda point: None,
    ) -> None:
        """Without ``copies`` what leaves the device is computed again; without ``retention`` host pages are kept until their
        place is needed. ``reached`` hears of each named point where a test may end the process."""
        self.cache = cache
        self.prefix = PrefixCache(cache.gpu_manager, policy)
        self.copies = copies
        self.costs = copies.costs if copies is not None else Costs()
        self.stats = PageStats()
        self._prefill_chunk = prefill_chunk
        self._retention = retention
        self._reached = reached
        self._promises = Promises()
        self._arriving: dict[str, _Arriving] = {}

    # --- what there is ------------------------------------------------------------------------------------------------

    @property
    def host(self) -> HostCache | None:
        return None if self.copies is None else self.copies.host

    @property
    def available(self) -> int:
        """Device pages that can be had now: free ones, and cached ones that nobody uses."""
        return self.cache.gpu_manager.free_count + self.prefix.num_evictable

    @property
    def leaving(self) -> int:
        """Device pages that become available as soon as copies in flight complete."""
        return 0 if self.copies is None else self.copies.pages_becoming_free

    @property
    def in_flight(self) -> int:
        """Transfers not yet collected."""
        return 0 if self.copies is None else self.copies.in_flight

    def locate(self, sequence: Sequence) -> list[Source] | None:
        """The Sequence's leading pages, up to the first that is nowhere. None: some are still on their way out."""
        if sequence.swapped is not None:
            assert self.copies is not None
            absent = [page for page in sequence.swapped if self.prefix.find(page.identity) is None and not page.readable]
            if not absent:
                return [Source(self.prefix.find(page.identity), page) for page in sequence.swapped]
            if any(self.copies.is_leaving(page) for page in absent):
                return None
            self._forget(sequence)
        sources = []
        for identity in self._identities(sequence, self._full_pages(sequence)):
            host_page = None if self.host is None or sequence.replays else self.host.find(identity)
            source = Source(self.prefix.find(identity), host_page)
            if source.device_page is None and (host_page is None or not host_page.readable):
                break
            sources.append(source)
        return sources

    def awaits_another(self, sequence: Sequence, sources: list[Source]) -> bool:
        """Its first page that is not on the device is being brought there or computed by another Sequence."""
        on_device = next((i for i, source in enumerate(sources) if source.device_page is None), len(sources))
        if on_device >= self._full_pages(sequence):
            return False
        return self._promises.by_another(self._identities(sequence, on_device + 1)[on_device], sequence.id)

    def admission_cost(self, sequence: Sequence, sources: list[Source]) -> int:
        """How many of the available pages it takes to give the Sequence all its pages."""
        hits = [source.device_page for source in sources if source.device_page is not None]
        return self.cache.pages_for(len(sequence.tokens)) - len(hits) + sum(map(self.prefix.is_evictable, hits))

    # --- a Sequence comes ---------------------------------------------------------------------------------------------

    def admit(self, sequence: Sequence, sources: list[Source]) -> Arrived | None:
        """Give the Sequence all its pages; None: some are on their way, ``collect`` will tell.

        Raises MemoryError when fewer are available than ``admission_cost``; then nothing has changed.
        """
        if self.admission_cost(sequence, sources) > self.available:
            raise MemoryError(f"{sequence.id} needs {self.admission_cost(sequence, sources)} pages, {self.available} are available")
        identities = self._identities(sequence, self._full_pages(sequence))
        hits = {
            index: self.prefix.take(identities[index], sequence.id)
            for index, source in enumerate(sources)
            if source.device_page is not None
        }
        total = self.cache.pages_for(len(sequence.tokens))
        fresh = iter(self._allocate(total - len(hits), sequence.id))
        self.cache.page_tables[sequence.id] = [hits[index] if index in hits else next(fresh) for index in range(total)]
        self._count_admission(sequence, sources, len(hits))
        for identity in identities[len(sources) : sequence.num_prompt // self.cache.page_size]:
            self._promises.give(identity, sequence.id)
        if self.host is not None and sequence.swapped is None:  # else it holds them since it left
            for source in sources:
                if source.host_page is not None:
                    self.host.hold(source.host_page, sequence.id)
        if len(hits) == len(sources):
            return self._arrive(sequence, len(sources))
        self._load(sequence, sources)
        return None

    def _load(self, sequence: Sequence, sources: list[Source]) -> None:
        assert self.copies is not None
        pages = []
        for device_page, source in zip(self.cache.page_tables[sequence.id], sources, strict=False):
            if source.device_page is None:
                assert source.host_page is not None
                pages.append((device_page, source.host_page))
                if source.host_page.identity:
                    self._promises.give(source.host_page.identity, sequence.id)
        load = Load(sequence.id, tuple(pages))
        self._arriving[sequence.id] = _Arriving(sequence, len(sources), load)
        self.copies.load(load)

    def _arrive(self, sequence: Sequence, found: int) -> Arrived:
        sequence.replays = False
        if sequence.swapped is None:
            page_size = self.cache.page_size
            begin = restart(
                sequence.num_prompt, sequence.num_generated, found, page_size=page_size, prefill_chunk=self._prefill_chunk
            )
            sequence.num_stored, sequence.num_sealed = begin.num_stored, found
            return Arrived(sequence, found, begin)
        assert self.host is not None
        for host_page in sequence.swapped:
            if not host_page.identity:  # on the device again, where it will change
                self.host.let_go(host_page, sequence.id)
        sequence.swapped = None
        return Arrived(sequence, found, Restart(sequence.num_stored, replayed=0))

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """``child`` has the same prompt, which ``parent`` has just computed: all its pages are the child's too, the tail included.

        Whoever writes into the tail first copies it (``grow``).
        """
        table = self.cache.page_tables[parent.id][: self.cache.pages_for(parent.num_prompt)]
        self.cache.page_tables[child.id] = list(table)
        child.identities = self._identities(parent, parent.num_sealed)[: parent.num_sealed]
        child.num_stored, child.num_sealed, child.replays = parent.num_prompt, parent.num_sealed, False
        for identity, page in zip(child.identities, table, strict=False):
            if self.prefix.find(identity) == page:
                self.prefix.policy.hit(identity)
            host_page = None if self.host is None else self.host.find(identity)
            if self.host is not None and host_page is not None:
                self.host.hold(host_page, child.id)
        self.cache.gpu_manager.share(table, child.id)
        self.stats.found_on_device += len(table)

    # --- a Sequence grows ---------------------------------------------------------------------------------------------

    def growth(self, sequence: Sequence) -> int:
        """Pages it takes to hold every token the Sequence has, with those that must be copied before it may write."""
        return self.cache.missing_pages(sequence.id, len(sequence.tokens)) + len(self._shared_tail(sequence))

    def grow(self, sequence: Sequence) -> None:
        """Give the Sequence ``growth`` pages: afterwards whatever it writes next is its own. Raises MemoryError."""
        table = self.cache.page_tables[sequence.id]
        for index in self._shared_tail(sequence):
            self._reached("cow.before")
            (own,) = self._allocate(1, sequence.id)
            self.cache.device.copy_page(table[index], own)
            self.prefix.let_go([table[index]], sequence.id)
            table[index] = own
            self.stats.copied_on_write += 1
            self._reached("cow.after")
        table += self._allocate(self.cache.missing_pages(sequence.id, len(sequence.tokens)), sequence.id)

    def _shared_tail(self, sequence: Sequence) -> list[int]:
        """Indices of pages that the next rows are written to and that others hold too."""
        table, first = self.cache.page_tables[sequence.id], sequence.num_stored // self.cache.page_size
        return [i for i in range(first, len(table)) if self.cache.gpu_manager.holders(table[i]) != (sequence.id,)]

    def stored(self, sequence: Sequence, end: int) -> None:
        """KV of the Sequence's tokens before ``end`` is in its pages now; full pages become sealed."""
        sequence.num_stored = max(sequence.num_stored, end)
        while (sequence.num_sealed + 1) * self.cache.page_size <= sequence.num_stored:
            self._seal(sequence, sequence.num_sealed)
            sequence.num_sealed += 1

    def _seal(self, sequence: Sequence, index: int) -> None:
        identity = self._identities(sequence, index + 1)[index]
        page = self.cache.page_tables[sequence.id][index]
        self._promises.keep(identity, sequence.id)
        if not sequence.request.publishes:
            return
        self._reached("prefix.before_publish")
        self.prefix.insert(identity, page)
        if self.copies is not None:
            self.copies.checkpoint(identity, page, sequence.id, self.stats)
        self._reached("prefix.after_publish")

    def flush(self) -> None:
        """Begin to copy what the step sealed."""
        if self.copies is not None:
            self.copies.flush()

    # --- a Sequence leaves --------------------------------------------------------------------------------------------

    def swap_out(self, sequence: Sequence) -> bool:
        """Preempt it and keep every row: clean pages are let go, the others are copied out first.

        False, and nothing has changed, when the host pool has no room for them.
        """
        if self.copies is None:
            return False
        host, table = self.copies.host, self.cache.page_tables[sequence.id][: self.cache.pages_for(sequence.num_stored)]
        sealed = self._identities(sequence, sequence.num_sealed)[: sequence.num_sealed]
        backed = [host.find(identity) for identity in sealed] + [None] * (len(table) - len(sealed))
        saved = self.copies.save([page for page, clean in zip(table, backed, strict=True) if clean is None], sequence.id)
        if saved is None:
            return False
        for clean in backed:
            if clean is not None:
                host.hold(clean, sequence.id)
        copied = iter(saved)
        sequence.swapped = tuple(clean if clean is not None else next(copied) for clean in backed)
        self._leave_device(sequence)
        return True

    def drop(self, sequence: Sequence) -> None:
        """Preempt it and keep nothing: what is not on the device any more when it comes back is computed again."""
        self.release(sequence)
        sequence.replays = True

    def abandon(self, sequence: Sequence) -> None:
        """Preempt it while its pages are on their way in: they stay where they came from."""
        self._leave_device(sequence)
        if sequence.swapped is None:
            self._forget(sequence)

    def release(self, sequence: Sequence) -> None:
        """The Sequence is finished or aborted, wherever it is. Its sealed pages stay, as cache."""
        self._leave_device(sequence)
        self._forget(sequence)

    def _leave_device(self, sequence: Sequence) -> None:
        self.prefix.let_go(self.cache.page_tables.pop(sequence.id, []), sequence.id)
        self._promises.withdraw(sequence.id)
        self._arriving.pop(sequence.id, None)

    def _forget(self, sequence: Sequence) -> None:
        if self.host is not None:
            self.host.release(sequence.id)
        sequence.swapped = None
        sequence.num_stored = sequence.num_sealed = 0

    # --- copies come back ---------------------------------------------------------------------------------------------

    def collect(self, wait: float = 0.0) -> list[Arrived | Failed]:
        """Apply the copies that completed, waiting up to ``wait`` seconds for the first. The Sequences that arrived."""
        if self._retention is not None:
            self._retention.sweep()
        if self.copies is None:
            return []
        arrived = [self._place(loaded) for loaded in self.copies.collect(self.stats, wait)]
        return [arrival for arrival in arrived if arrival is not None]

    def wait(self, seconds: float) -> list[Arrived | Failed]:
        """Nothing can be computed before a copy completes: a stall."""
        began = time.perf_counter()
        arrived = self.collect(seconds)
        self.stats.stall_seconds += time.perf_counter() - began
        return arrived

    def _place(self, loaded: Loaded) -> Arrived | Failed | None:
        """What came in is cache, whether or not its Sequence still wants it."""
        assert self.copies is not None
        load = loaded.load
        for device_page, host_page in load.pages:
            self._promises.keep(host_page.identity, load.sequence_id)
            if host_page.identity and host_page not in loaded.failed:
                self.prefix.insert(host_page.identity, device_page)
        self.copies.unpin(load)
        arriving = self._arriving.get(load.sequence_id)
        if arriving is None or arriving.load is not load:  # it left meanwhile
            return None
        del self._arriving[load.sequence_id]
        if loaded.failed:
            self.release(arriving.sequence)
            return Failed(arriving.sequence)
        return self._arrive(arriving.sequence, arriving.found)

    def close(self) -> None:
        """Let the copies in flight finish."""
        if self._retention is not None:
            self._retention.close()
        if self.copies is not None:
            self.copies.close()

    # --- internals ----------------------------------------------------------------------------------------------------

    def _full_pages(self, sequence: Sequence) -> int:
        return len(sequence.tokens) // self.cache.page_size

    def _identities(self, sequence: Sequence, count: int) -> list[str]:
        """Identities of at least the first ``count`` pages, which must be full."""
        if len(sequence.identities) < count:
            sequence.identities = page_identities(
                sequence.request.root,
                sequence.tokens,
                sequence.num_prompt,
                page_size=self.cache.page_size,
                prefill_chunk=self._prefill_chunk,
                known=sequence.identities,
            )
        return sequence.identities

    def _allocate(self, count: int, holder: str) -> list[int]:
        manager = self.cache.gpu_manager
        while manager.free_count < count:
            self._reached("evict.before")
            if not self.prefix.evict():
                break
            self._reached("evict.after")
        return manager.allocate(count, holder)

    def _count_admission(self, sequence: Sequence, sources: list[Source], on_device: int) -> None:
        stats, prompt_pages = self.stats, sequence.num_prompt // self.cache.page_size
        stats.found_on_device += on_device
        stats.found_on_host += len(sources) - on_device
        stats.missing += max(0, prompt_pages - len(sources))
        known = self.cache.pages_for(len(sequence.tokens) - 1) if sequence.num_generated else 0
        stats.faults += max(known, len(sources)) - on_device

    def problems(self) -> list[str]:
        """What is inconsistent between tables, caches, copies and both pools, in words."""
        found = self.cache.problems() + self.prefix.problems()
        if self.copies is not None:
            found += self.copies.problems()
        found += [f"{one} promised pages and has none" for one in self._promises.owners - self.cache.page_tables.keys()]
        found += [f"{one} is arriving without pages" for one in self._arriving.keys() - self.cache.page_tables.keys()]
        return found
