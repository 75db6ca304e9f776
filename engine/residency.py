"""Which pages of which Sequence are where, and how they get there.

The books of both pools. What is decided here is applied between steps: copies run beside them, pin their pages on both sides, and
come back as completions (``swap.py``). A device page is held by the Sequences that have it in their tables, by the prefix cache
(``CACHE``), by copies in flight (``COPY``); it is free when nobody holds it.
"""

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from engine.cache import PagedKVCache
from engine.costs import Costs
from engine.eviction import EvictionPolicy
from engine.host_cache import COPY, HostCache, HostPage
from engine.identity import page_identities
from engine.prefix_cache import CACHE, PrefixCache
from engine.sequence import Restart, Sequence, restart
from engine.swap import Completed, Direction, PageMove, SwapEngine, Transfer


@dataclass(slots=True)
class ResidencyStats:
    """Counters since the start. Pages, unless said otherwise."""

    pages_found_on_device: int = 0  #: at an admission, of the Sequence's full pages
    pages_found_on_host: int = 0
    pages_missing: int = 0  #: full prompt pages found nowhere: computed
    page_faults: int = 0  #: needed for tokens that a Sequence has, and not on the device when it was planned
    pages_read: int = 0  #: of planned Sequences' tables, over all steps: the faults' denominator
    pages_stored: int = 0  #: checkpointed: copied to the host pool when they were sealed
    pages_swapped_out: int = 0  #: copied at a preemption, because the host pool did not have them
    pages_swapped_in: int = 0
    pages_unbacked: int = 0  #: sealed, but no free host page: recomputed when they are wanted again
    pages_copied_on_write: int = 0
    copies_failed: int = 0
    verify_failures: int = 0
    out_seconds: float = 0.0  #: that copies to the host took, beside the steps
    in_seconds: float = 0.0
    stall_seconds: float = 0.0  #: that the loop waited for copies because nothing could be computed


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


@dataclass(slots=True)
class _Load:
    sequence: Sequence
    found: int
    host_pages: list[HostPage]
    abandoned: bool = False  #: the Sequence was aborted or preempted meanwhile


@dataclass(frozen=True, slots=True)
class _Store:
    device_page: int
    host_page: HostPage


@dataclass(slots=True)
class _Promises:
    """Pages on their way to the device, by computing or by copying: others wait for them instead of making them twice."""

    owners: dict[str, str] = field(default_factory=dict)  # identity -> Sequence
    given: dict[str, set[str]] = field(default_factory=dict)  # Sequence -> identities

    def give(self, identity: str, sequence_id: str) -> None:
        if identity not in self.owners:
            self.owners[identity] = sequence_id
            self.given.setdefault(sequence_id, set()).add(identity)

    def keep(self, identity: str, sequence_id: str) -> None:
        if self.owners.get(identity) == sequence_id:
            del self.owners[identity]
            self.given[sequence_id].discard(identity)

    def withdraw(self, sequence_id: str) -> None:
        for identity in self.given.pop(sequence_id, ()):
            del self.owners[identity]


class Residency:
    """Page tables, prefix cache, host cache and the copies between them. The step loop owns it."""

    def __init__(
        self,
        cache: PagedKVCache,
        policy: EvictionPolicy[str],
        *,
        prefill_chunk: int,
        host: HostCache | None = None,
        swap: SwapEngine | None = None,
        on_problem: Callable[[str, str], None] = lambda event, problem: None,
        reached: Callable[[str], None] = lambda point: None,
    ) -> None:
        """``host`` and ``swap``: both or neither; without them what leaves the device is computed again. ``on_problem`` hears
        of an event and its words; ``reached`` of each named point where a test may end the process."""
        assert (host is None) == (swap is None)
        self.cache = cache
        self.prefix = PrefixCache(cache.gpu_manager, policy)
        self.host = host
        self.swap = swap
        self.stats = ResidencyStats()
        self.costs = Costs()
        self._prefill_chunk = prefill_chunk
        self._on_problem = on_problem
        self._reached = reached
        self._promises = _Promises()
        self._loads: dict[Transfer, _Load] = {}
        self._stores: dict[int, _Store] = {}  # by host page
        self._outbox: list[PageMove] = []

    # --- what there is ------------------------------------------------------------------------------------------------

    @property
    def available(self) -> int:
        """Device pages that can be had now: free ones, and cached ones that nobody uses."""
        return self.cache.gpu_manager.free_count + self.prefix.num_evictable

    @property
    def leaving(self) -> int:
        """Device pages that become available as soon as copies in flight complete."""
        manager = self.cache.gpu_manager
        return sum(set(manager.holders(page)) <= {COPY, CACHE} for page in manager.held_by(COPY))

    @property
    def in_flight(self) -> int:
        """Transfers not yet collected."""
        return 0 if self.swap is None else self.swap.in_flight

    @property
    def pages_in_flight(self) -> int:
        """Pages on their way to the host, or about to be."""
        return len(self._stores)

    def locate(self, sequence: Sequence) -> list[Source] | None:
        """The Sequence's leading pages, up to the first that is nowhere. None: some are still on their way out."""
        if sequence.swapped is not None:
            sources = [Source(self.prefix.find(page.identity), page) for page in sequence.swapped]
            lost = [s for s in sources if s.device_page is None and s.host_page is not None and not s.host_page.readable]
            if not lost:
                return sources
            if any(s.host_page is not None and s.host_page.page in self._stores for s in lost):
                return None
            self._forget_swapped(sequence)
        sources = []
        for identity in self._identities(sequence, len(sequence.tokens) // self.cache.page_size):
            host_page = None if self.host is None or sequence.replays else self.host.find(identity)
            source = Source(self.prefix.find(identity), host_page)
            if source.device_page is None and (source.host_page is None or not source.host_page.readable):
                break
            sources.append(source)
        return sources

    def awaits_another(self, sequence: Sequence, sources: list[Source]) -> bool:
        """Its first page that is not on the device is being brought there or computed by another Sequence."""
        count = len(sequence.tokens) // self.cache.page_size
        on_device = next((i for i, source in enumerate(sources) if source.device_page is None), len(sources))
        if on_device >= count:
            return False
        return self._promises.owners.get(self._identities(sequence, count)[on_device], sequence.id) != sequence.id

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
        identities = self._identities(sequence, len(sequence.tokens) // self.cache.page_size)
        table: list[int | None] = [
            None if source.device_page is None else self.prefix.take(identities[index], sequence.id)
            for index, source in enumerate(sources)
        ]
        table += [None] * (self.cache.pages_for(len(sequence.tokens)) - len(table))
        found = [index for index, page in enumerate(table) if page is not None]
        absent = [index for index, page in enumerate(table) if page is None]
        for index, page in zip(absent, self._allocate(len(absent), sequence.id), strict=True):
            table[index] = page
        self.cache.page_tables[sequence.id] = [page for page in table if page is not None]
        self._count_admission(sequence, sources, len(found))
        for identity in identities[len(sources) : sequence.num_prompt // self.cache.page_size]:
            self._promises.give(identity, sequence.id)
        for source in sources:
            if self.host is not None and source.host_page is not None and sequence.swapped is None:
                self.host.hold(source.host_page, sequence.id)
        if len(found) == len(sources):
            return self._arrive(sequence, len(sources))
        self._load(sequence, sources)
        return None

    def _load(self, sequence: Sequence, sources: list[Source]) -> None:
        assert self.host is not None
        assert self.swap is not None
        manager, table = self.cache.gpu_manager, self.cache.page_tables[sequence.id]
        moves, host_pages = [], []
        for device_page, source in zip(table, sources, strict=False):
            if source.device_page is None:
                assert source.host_page is not None
                host_pages.append(source.host_page)
                moves.append(PageMove(device_page, source.host_page.page, source.host_page.checksum))
                manager.share([device_page], COPY)
                self.host.prepare_load(source.host_page)
                if source.host_page.identity:
                    self._promises.give(source.host_page.identity, sequence.id)
        transfer = Transfer(Direction.IN, tuple(moves))
        self._loads[transfer] = _Load(sequence, len(sources), host_pages)
        self.swap.submit(transfer)

    def _arrive(self, sequence: Sequence, found: int) -> Arrived:
        page_size = self.cache.page_size
        sequence.replays = False
        begin = restart(sequence.num_prompt, sequence.num_generated, found, page_size=page_size, prefill_chunk=self._prefill_chunk)
        if sequence.swapped is None:
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
        child.num_stored, child.num_sealed = parent.num_prompt, parent.num_sealed
        for identity, page in zip(child.identities, table, strict=False):
            if self.prefix.find(identity) == page:
                self.prefix.policy.hit(identity)
            host_page = None if self.host is None else self.host.find(identity)
            if self.host is not None and host_page is not None:
                self.host.hold(host_page, child.id)
        self.cache.gpu_manager.share(table, child.id)
        self.stats.pages_found_on_device += len(table)

    # --- a Sequence grows ---------------------------------------------------------------------------------------------

    def growth(self, sequence: Sequence) -> int:
        """Pages it takes to hold every token the Sequence has, with those that must be copied before it may write."""
        return self.cache.missing_pages(sequence.id, len(sequence.tokens)) + len(self._shared_tail(sequence))

    def grow(self, sequence: Sequence) -> None:
        """Make every page that the Sequence writes next its own. Raises MemoryError; what was grown until then stays."""
        table = self.cache.page_tables[sequence.id]
        for index in self._shared_tail(sequence):
            self._reached("cow.before")
            (own,) = self._allocate(1, sequence.id)
            self.cache.device.copy_page(table[index], own)
            self.prefix.let_go([table[index]], sequence.id)
            table[index] = own
            self.stats.pages_copied_on_write += 1
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
        self._checkpoint(identity, page, sequence.id)
        self._reached("prefix.after_publish")

    def _checkpoint(self, identity: str, page: int, sequence_id: str) -> None:
        host = self.host
        if host is None or self.cache.host is None or self.cache.host.backing.poisoned:
            return
        host_page = host.find(identity)
        if host_page is not None:
            host.hold(host_page, sequence_id)
            return
        host_page = host.prepare_store(identity, sequence_id)
        if host_page is None:
            self.stats.pages_unbacked += 1
            return
        self._outbox.append(self._prepare_out(page, host_page))

    def _prepare_out(self, page: int, host_page: HostPage) -> PageMove:
        self.cache.gpu_manager.share([page], COPY)
        self._stores[host_page.page] = _Store(page, host_page)
        return PageMove(page, host_page.page)

    def flush(self) -> None:
        """Begin to copy what the step sealed: all of it in one transfer."""
        if self._outbox:
            assert self.swap is not None
            self.stats.pages_stored += len(self._outbox)
            self.swap.submit(Transfer(Direction.OUT, tuple(self._outbox), durable=True))
            self._outbox = []

    # --- a Sequence leaves --------------------------------------------------------------------------------------------

    def swap_out(self, sequence: Sequence) -> bool:
        """Preempt it and keep every row: clean pages are let go, the others are copied out first.

        False, and nothing has changed, when the host pool has no room for them.
        """
        host, swap = self.host, self.swap
        if host is None or swap is None or self.cache.host is None or self.cache.host.backing.poisoned:
            return False
        table = self.cache.page_tables[sequence.id][: self.cache.pages_for(sequence.num_stored)]
        identities = self._identities(sequence, sequence.num_sealed)
        backed = [host.find(identities[i]) if i < sequence.num_sealed else None for i in range(len(table))]
        if backed.count(None) > host.free_count:
            return False
        moves, pages = [], []
        for device_page, host_page in zip(table, backed, strict=True):
            if host_page is None:
                host_page = host.prepare_store("", sequence.id)
                assert host_page is not None
                moves.append(self._prepare_out(device_page, host_page))
            else:
                host.hold(host_page, sequence.id)
            pages.append(host_page)
        sequence.swapped = tuple(pages)
        if moves:
            self.stats.pages_swapped_out += len(moves)
            swap.submit(Transfer(Direction.OUT, tuple(moves)))
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
            self._forget_swapped(sequence)

    def release(self, sequence: Sequence) -> None:
        """The Sequence is finished or aborted, wherever it is. Its sealed pages stay, as cache."""
        self._leave_device(sequence)
        self._forget_swapped(sequence)

    def _leave_device(self, sequence: Sequence) -> None:
        self.prefix.let_go(self.cache.page_tables.pop(sequence.id, []), sequence.id)
        self._promises.withdraw(sequence.id)
        for load in self._loads.values():
            load.abandoned |= load.sequence is sequence

    def _forget_swapped(self, sequence: Sequence) -> None:
        if self.host is not None:
            self.host.release(sequence.id)
        sequence.swapped = None
        sequence.num_stored = sequence.num_sealed = 0

    # --- copies come back ---------------------------------------------------------------------------------------------

    def collect(self, wait: float = 0.0) -> list[Arrived | Failed]:
        """Apply what the swap engine completed, waiting up to ``wait`` seconds for the first. The Sequences that arrived."""
        if self.swap is None or self.host is None:
            return []
        arrived: list[Arrived | Failed] = []
        for done in self.swap.completed(wait):
            self.costs.copied(done)
            if done.transfer.direction is Direction.OUT:
                self._complete_out(done)
            else:
                arrived += self._complete_in(done)
        self.host.make_room()
        return arrived

    def wait(self, seconds: float) -> list[Arrived | Failed]:
        """Nothing can be computed before a copy completes: a stall."""
        began = time.perf_counter()
        arrived = self.collect(seconds)
        self.stats.stall_seconds += time.perf_counter() - began
        return arrived

    def _complete_out(self, done: Completed) -> None:
        assert self.host is not None
        self.stats.out_seconds += done.seconds
        for move, checksum, problem in zip(done.transfer.moves, done.checksums, done.problems, strict=True):
            self.cache.gpu_manager.free([move.device_page], owner=COPY)
            self.host.complete_store(self._stores.pop(move.host_page).host_page, None if problem else checksum)
            if problem:
                self.stats.copies_failed += 1
                self._on_problem("checkpoint_failed" if done.transfer.durable else "swap_out_failed", problem)

    def _complete_in(self, done: Completed) -> list[Arrived | Failed]:
        assert self.host is not None
        load = self._loads.pop(done.transfer)
        self.stats.in_seconds += done.seconds
        for move, host_page, problem in zip(done.transfer.moves, load.host_pages, done.problems, strict=True):
            self._promises.keep(host_page.identity, load.sequence.id)
            self.host.complete_load(host_page, ok=not problem)
            if problem:
                self.stats.verify_failures += 1
                self._on_problem("page_verify_failed", f"host page {move.host_page}: {problem}; it is recomputed")
            else:
                self.stats.pages_swapped_in += 1
                if host_page.identity:
                    self.prefix.insert(host_page.identity, move.device_page)
            self.cache.gpu_manager.free([move.device_page], owner=COPY)
        if load.abandoned:
            return []
        if any(done.problems):
            self.release(load.sequence)
            return [Failed(load.sequence)]
        return [self._arrive(load.sequence, load.found)]

    def close(self) -> None:
        """Let the copies in flight finish and their threads end."""
        if self.swap is not None:
            self.swap.close()

    # --- internals ----------------------------------------------------------------------------------------------------

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
        stats.pages_found_on_device += on_device
        stats.pages_found_on_host += len(sources) - on_device
        stats.pages_missing += max(0, prompt_pages - len(sources))
        known = self.cache.pages_for(len(sequence.tokens) - 1) if sequence.num_generated else len(sources)
        stats.page_faults += max(known, len(sources)) - on_device

    def problems(self) -> list[str]:
        """What is inconsistent between tables, caches, copies and both pools, in words."""
        found = self.cache.problems() + self.prefix.problems()
        if self.host is not None:
            found += self.host.problems()
        copied = Counter(move.device_page for transfer in self._loads for move in transfer.moves)
        copied.update(store.device_page for store in self._stores.values())
        manager = self.cache.gpu_manager
        pinned = {page: manager.holders(page).count(COPY) for page in manager.held_by(COPY)}
        if pinned != copied:
            found.append(f"device pages pinned by copies: {pinned}, copies in flight: {dict(copied)}")
        return found
