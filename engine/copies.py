"""The books of the copies in flight: what each one pins, and what becomes true when it completes.

A copy holds its device page and its host page under the name ``COPY``, whatever happens to its Sequence meanwhile: else the page
would be used again in mid-copy, and the checksum of the wrong bytes would verify for ever.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine.costs import Costs
from engine.host_cache import COPY, HostCache, HostPage
from engine.page_manager import PageManager
from engine.pools import HostPool
from engine.prefix_cache import CACHE
from engine.stats import PageStats
from engine.swap import Completed, Direction, PageMove, SwapEngine, Transfer


@dataclass(frozen=True, slots=True, eq=False)
class Load:
    """Pages of one Sequence on their way in: ``pages`` are (device page, host page)."""

    sequence_id: str
    pages: tuple[tuple[int, HostPage], ...]


@dataclass(frozen=True, slots=True)
class Loaded:
    """``failed``: the host pages that were not what was stored, or could not be read; their device pages hold anything."""

    load: Load
    failed: frozenset[HostPage]


@dataclass(frozen=True, slots=True)
class _Store:
    device_page: int
    host_page: HostPage


class Copies:
    """Between the device's pages and the host cache. The step loop owns it; the swap engine moves the bytes."""

    def __init__(
        self,
        device: PageManager,
        host: HostCache,
        pool: HostPool,
        swap: SwapEngine,
        *,
        on_problem: Callable[[str, str], None] = lambda event, problem: None,
    ) -> None:
        """``on_problem`` hears of an event and its words: ``checkpoint_failed``, ``swap_out_failed``, ``page_verify_failed``."""
        self.host = host
        self.costs = Costs()
        self._device = device
        self._pool = pool
        self._swap = swap
        self._on_problem = on_problem
        self._loads: dict[Transfer, Load] = {}
        self._stores: dict[int, _Store] = {}  # by host page
        self._outbox: list[PageMove] = []

    @property
    def in_flight(self) -> int:
        """Transfers not yet collected."""
        return self._swap.in_flight

    @property
    def pages_leaving(self) -> int:
        """Pages on their way to the host, or about to be."""
        return len(self._stores)

    @property
    def pages_becoming_free(self) -> int:
        """Device pages that nobody but copies in flight (and maybe the prefix cache) needs."""
        return sum(set(self._device.holders(page)) <= {COPY, CACHE} for page in self._device.held_by(COPY))

    def is_leaving(self, host_page: HostPage) -> bool:
        """Its copy has not come back yet."""
        store = self._stores.get(host_page.page)
        return store is not None and store.host_page is host_page

    # --- out ----------------------------------------------------------------------------------------------------------

    def checkpoint(self, identity: str, device_page: int, holder: str, stats: PageStats) -> None:
        """A page was sealed: unless the host cache has these bits, copy them there with the next ``flush``."""
        if self._pool.backing.poisoned:
            return
        host_page = self.host.find(identity)
        if host_page is not None:
            self.host.hold(host_page, holder)
            return
        host_page = self.host.prepare_store(identity, holder)
        if host_page is None:
            stats.unbacked += 1
            return
        stats.stored += 1
        self._outbox.append(self._pin_out(device_page, host_page))

    def flush(self) -> None:
        """Begin to copy what was sealed: all of it in one transfer."""
        if self._outbox:
            self._swap.submit(Transfer(Direction.OUT, tuple(self._outbox), durable=True))
            self._outbox = []

    def save(self, device_pages: Sequence[int], holder: str) -> list[HostPage] | None:
        """Begin to copy pages that only ``holder`` will ask for. None: the host pool has no room, and nothing has begun."""
        if self._pool.backing.poisoned or len(device_pages) > self.host.free_count:
            return None
        moves, host_pages = [], []
        for device_page in device_pages:
            host_page = self.host.prepare_store("", holder)
            assert host_page is not None
            host_pages.append(host_page)
            moves.append(self._pin_out(device_page, host_page))
        if moves:
            self._swap.submit(Transfer(Direction.OUT, tuple(moves)))
        return host_pages

    def _pin_out(self, device_page: int, host_page: HostPage) -> PageMove:
        self._device.share([device_page], COPY)
        self._stores[host_page.page] = _Store(device_page, host_page)
        return PageMove(device_page, host_page.page)

    # --- in -----------------------------------------------------------------------------------------------------------

    def load(self, load: Load) -> None:
        """Begin to bring pages in."""
        moves = []
        for device_page, host_page in load.pages:
            self._device.share([device_page], COPY)
            self.host.prepare_load(host_page)
            moves.append(PageMove(device_page, host_page.page, host_page.checksum))
        transfer = Transfer(Direction.IN, tuple(moves))
        self._loads[transfer] = load
        self._swap.submit(transfer)

    # --- back ---------------------------------------------------------------------------------------------------------

    def collect(self, stats: PageStats, wait: float = 0.0) -> list[Loaded]:
        """Apply what completed, waiting up to ``wait`` seconds for the first. Device pages of what was loaded are still pinned:
        give each ``Loaded`` to ``unpin`` when they are in place."""
        loaded = []
        for done in self._swap.completed(wait):
            self.costs.copied(done)
            if done.transfer.direction is Direction.OUT:
                self._complete_out(done, stats)
            else:
                loaded.append(self._complete_in(done, stats))
        self.host.make_room()
        return loaded

    def unpin(self, load: Load) -> None:
        self._device.free([device_page for device_page, _ in load.pages], owner=COPY)

    def close(self) -> None:
        """Let the copies in flight finish and their threads end."""
        self._swap.close()

    def _complete_out(self, done: Completed, stats: PageStats) -> None:
        stats.out_seconds += done.seconds
        for move, checksum, problem in zip(done.transfer.moves, done.checksums, done.problems, strict=True):
            self._device.free([move.device_page], owner=COPY)
            host_page = self._stores.pop(move.host_page).host_page
            self.host.complete_store(host_page, None if problem else checksum)
            if problem:
                stats.copies_failed += 1
                self._on_problem("checkpoint_failed" if done.transfer.durable else "swap_out_failed", problem)
            elif not host_page.identity:
                stats.swapped_out += 1

    def _complete_in(self, done: Completed, stats: PageStats) -> Loaded:
        stats.in_seconds += done.seconds
        load = self._loads.pop(done.transfer)
        failed = set()
        for (_, host_page), problem in zip(load.pages, done.problems, strict=True):
            self.host.complete_load(host_page, ok=not problem)
            if problem:
                failed.add(host_page)
                stats.verify_failures += 1
                self._on_problem("page_verify_failed", f"host page {host_page.page}: {problem}; it is recomputed")
            else:
                stats.swapped_in += 1
        return Loaded(load, frozenset(failed))

    def problems(self) -> list[str]:
        """What is inconsistent between copies in flight, their pins and the host cache, in words."""
        copied = Counter(device_page for load in self._loads.values() for device_page, _ in load.pages)
        copied.update(store.device_page for store in self._stores.values())
        pinned = {page: self._device.holders(page).count(COPY) for page in self._device.held_by(COPY)}
        found = self.host.problems()
        if pinned != copied:
            found.append(f"device pages pinned by copies: {pinned}, copies in flight: {dict(copied)}")
        return found
