"""What the host pool holds, by identity, with what is on its way in and out.

Life of a host page::

    free --prepare_store--> filling --complete_store--> filled --published--> published --evict--> dropping --dropped--> free
                               \\--(failed)--> gone

A page is written only while no entry of a durable table names it (free -> filling), an entry is published only for a page whose
copy is complete (filled -> published), and a page is used again only after the answer to dropping its entry (dropping -> free). A
host pool without a durable table skips the last two states. A page without identity holds what one Sequence swapped out: it is
never published and goes when that Sequence lets go.

A free page still has the bytes of its last life. When nobody had a use for them for the retention time it is taken, zeroed, and
free again (``begin_erase``, ``complete_erase``); a cached page that nobody used for so long is evicted first.
"""

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from operator import itemgetter
from types import MappingProxyType

from engine.eviction import EvictionPolicy
from engine.page_manager import PageManager

#: Holders of host pages beside Sequences: the cache itself, each copy in flight, and whoever zeroes a free page.
ENTRY, COPY, ERASE = "entry", "copy", "erase"


class HostState(StrEnum):
    FILLING = "filling"
    FILLED = "filled"
    PUBLISHED = "published"
    DROPPING = "dropping"
    GONE = "gone"  #: its copy failed, or its entry is dropped; a Sequence that still holds it must not read it


@dataclass(slots=True, eq=False)
class HostPage:
    page: int
    identity: str  #: empty: known to its Sequence alone
    state: HostState = HostState.FILLING
    checksum: int = 0

    @property
    def readable(self) -> bool:
        return self.state in (HostState.FILLED, HostState.PUBLISHED)


class HostCache:
    """Bookkeeping only: ids, identities, states, who goes first. The step loop owns it."""

    def __init__(
        self,
        manager: PageManager,
        policy: EvictionPolicy[str],
        *,
        durable: bool = False,
        reserve: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``durable``: entries live in a store that must answer before a page is used again. ``reserve``: pages kept free, so
        that no copy waits for an eviction."""
        self.manager = manager
        self.policy = policy
        self.clock = clock
        self._durable = durable
        self._reserve = reserve
        self._by_identity: dict[str, HostPage] = {}
        #: what held pages are: cached, private to a Sequence, being dropped, or gone and not yet let go
        self._pages: dict[int, HostPage] = {}
        self._dropping: set[int] = set()
        #: page -> when its bytes were of use last, by ``clock``; oldest first, without the pages that were zeroed since
        self._last_use: OrderedDict[int, float] = OrderedDict()
        self.ready: list[HostPage] = []  #: filled, to be published
        self.drops: list[int] = []  #: entries to be dropped
        self.num_evictions = 0

    def adopt(self, table: Mapping[int, tuple[str, int]], ages: Mapping[int, float] = MappingProxyType({})) -> None:
        """Hold exactly the pages of ``table``, host page -> (identity, checksum), as earlier lives published them; before any
        other page is held. Entries of pages that this pool does not have, and doubles, are dropped.

        Not before nobody else can write to the durable table: a page that it names and we do not hold would be written to. Of a
        page's uses only the first is durable: ``ages``, host page -> seconds since it was published, now if it is not there. One
        without an entry is of use to nobody, and nobody knows what a crash left in it.
        """
        ours = {page: entry for page, entry in sorted(table.items()) if page < self.manager.total_pages}
        self.drops += sorted(table.keys() - ours.keys())
        self._last_use.update((page, float("-inf")) for page in range(self.manager.total_pages) if page not in ours)
        now = self.clock()
        last_use = {page: now - ages.get(page, 0.0) for page in ours}
        self._last_use.update(sorted(last_use.items(), key=itemgetter(1)))
        self.manager.take(ours, ENTRY, "cpu")
        for page, (identity, checksum) in ours.items():
            host_page = self._pages[page] = HostPage(page, identity, HostState.PUBLISHED, checksum)
            if identity in self._by_identity:
                self._drop(host_page)
                continue
            self._by_identity[identity] = host_page
            self.policy.insert(identity)

    def __len__(self) -> int:
        return len(self._by_identity)

    @property
    def pages(self) -> Iterable[HostPage]:
        """All that are held, but for those that are being zeroed."""
        return self._pages.values()

    @property
    def free_count(self) -> int:
        return self.manager.free_count

    def find(self, identity: str) -> HostPage | None:
        """The page with these bits, filling or readable."""
        return self._by_identity.get(identity)

    # --- pairs: prepare a copy, complete it ---------------------------------------------------------------------------

    def prepare_store(self, identity: str, holder: str) -> HostPage | None:
        """A free host page to be filled for the Sequence ``holder``, pinned by the copy; None when there is none."""
        if not self.manager.free_count:
            return None
        (page,) = self.manager.allocate(1, COPY, "cpu")
        self.manager.share([page], holder)
        host_page = self._pages[page] = HostPage(page, identity)
        self._use(page)
        if identity:
            self.manager.share([page], ENTRY)
            self._by_identity[identity] = host_page
            self.policy.insert(identity)
        return host_page

    def complete_store(self, host_page: HostPage, checksum: int | None) -> None:
        """The copy ended; ``None``: it failed, nothing is known of the bytes, and no entry ever named the page."""
        self._unpin(host_page)
        if checksum is None:
            host_page.state = HostState.GONE
            if host_page.identity:
                del self._by_identity[host_page.identity]
                self.policy.discard(host_page.identity)
                self._let_go(host_page.page, ENTRY)
            return
        host_page.state, host_page.checksum = HostState.FILLED, checksum
        if host_page.identity and self._durable:
            self.ready.append(host_page)

    def prepare_load(self, host_page: HostPage) -> None:
        """Pin a readable page: whatever happens to its Sequence, it stays as it is while it is read."""
        self.manager.share([host_page.page], COPY)

    def complete_load(self, host_page: HostPage, *, ok: bool) -> None:
        """The read ended. Not ``ok``: these bytes are not what was stored, and are never used again."""
        self._unpin(host_page)
        if not ok:
            self.condemn(host_page)

    # --- who holds what -----------------------------------------------------------------------------------------------

    def hold(self, host_page: HostPage, sequence_id: str) -> None:
        """While a Sequence is backed by it, a page is not evicted."""
        if sequence_id not in self.manager.holders(host_page.page):
            self.manager.share([host_page.page], sequence_id)
            self._use(host_page.page)
            if host_page.identity:
                self.policy.hit(host_page.identity)

    def let_go(self, host_page: HostPage, sequence_id: str) -> None:
        self._use(host_page.page)
        self._let_go(host_page.page, sequence_id)

    def release(self, sequence_id: str) -> None:
        """The Sequence needs nothing here any more."""
        for page in self.manager.held_by(sequence_id):
            self._use(page)
            self._let_go(page, sequence_id)

    # --- giving pages up ----------------------------------------------------------------------------------------------

    def make_room(self) -> None:
        """Keep the reserve free: what the policy names goes, never what backs a Sequence or is being copied."""
        becoming_free = len(self._dropping) + self.manager.held_alone_by(ERASE)
        for _ in range(self._reserve - self.free_count - becoming_free):
            identity = self.policy.victim(None, self._evictable)
            if identity is None:
                return
            self.num_evictions += 1
            self._give_up(self._by_identity[identity])

    def condemn(self, host_page: HostPage) -> None:
        """Never use the page again: its bytes do not verify."""
        if not host_page.readable:
            return
        if host_page.identity:
            self.policy.discard(host_page.identity)
            self._give_up(host_page)
        else:
            host_page.state = HostState.GONE

    def published(self, identity: str) -> None:
        """The store answered: the entry is durable."""
        host_page = self._by_identity.get(identity)
        if host_page is not None and host_page.state is HostState.FILLED:
            host_page.state = HostState.PUBLISHED

    def dropped(self, page: int) -> None:
        """The store answered that no entry names this page any more."""
        if page in self._dropping:
            self._dropping.remove(page)
            self._pages[page].state = HostState.GONE
            self._let_go(page, ENTRY)

    def begin_erase(self, unused_seconds: float, limit: int) -> list[int]:
        """What nobody had a use for in so long begins to go, ``limit`` pages at most. The free ones among it, to be zeroed.

        A cached page takes two calls: the first gives it up, and one after the store's answer finds it free.
        """
        begun: list[int] = []
        before = self.clock() - unused_seconds
        for page, last_use in self._last_use.items():
            if len(begun) == limit or last_use > before:
                break
            if page not in self._dropping and ERASE not in self.manager.holders(page):
                begun.append(page)
        free = [page for page in begun if page not in self._pages]
        self.manager.take(free, ERASE, "cpu")
        for page in begun:
            if page in self._pages and not self._evict_unused(self._pages[page]):
                self._use(page)  # somebody holds it
        return free

    def complete_erase(self, page: int, *, ok: bool) -> None:
        """It is zeros. Not ``ok``: nobody knows; it is tried again when it was free for as long once more."""
        if ok:
            del self._last_use[page]
        else:
            self._use(page)
        self.manager.free([page], owner=ERASE)

    def _evict_unused(self, host_page: HostPage) -> bool:
        cached = self._by_identity.get(host_page.identity) is host_page
        if not cached or not self._evictable(host_page.identity):
            return False
        self.policy.discard(host_page.identity)
        self._give_up(host_page)
        return True

    def _evictable(self, identity: str) -> bool:
        host_page = self._by_identity[identity]
        settled = HostState.PUBLISHED if self._durable else HostState.FILLED
        return host_page.state is settled and self.manager.holders(host_page.page) == (ENTRY,)

    def _give_up(self, host_page: HostPage) -> None:
        del self._by_identity[host_page.identity]
        if self._durable:
            # Filled but not yet published: an entry may be on its way, so its drop goes behind it, through the same pipeline.
            if host_page.state is HostState.FILLED:
                self.ready = [page for page in self.ready if page is not host_page]
            self._drop(host_page)
        else:
            host_page.state = HostState.GONE
            self._let_go(host_page.page, ENTRY)

    def _drop(self, host_page: HostPage) -> None:
        host_page.state = HostState.DROPPING
        self._dropping.add(host_page.page)
        self.drops.append(host_page.page)

    # --- internals ----------------------------------------------------------------------------------------------------

    def _use(self, page: int) -> None:
        self._last_use[page] = self.clock()
        self._last_use.move_to_end(page)

    def _unpin(self, host_page: HostPage) -> None:
        self._use(host_page.page)
        self._let_go(host_page.page, COPY)

    def _let_go(self, page: int, holder: str) -> None:
        self.manager.free([page], owner=holder)
        if not self.manager.holders(page):
            del self._pages[page]

    def problems(self) -> list[str]:
        """What is inconsistent, in words."""
        found = self.manager.problems() + self.policy.problems()
        named = {page.page: page for page in self._by_identity.values()}
        found += [f"host page {n} is named and another" for n, page in named.items() if self._pages.get(n) is not page]
        dropping = {n for n, page in self._pages.items() if page.state is HostState.DROPPING}
        if dropping != self._dropping:
            found.append(f"host pages being dropped: {sorted(self._dropping)}, in that state: {sorted(dropping)}")
        with_entry = named.keys() | dropping
        found += [f"host page {page} is without its entry" for page in with_entry if ENTRY not in self.manager.holders(page)]
        found += [
            f"{identity} is cached but unknown to the policy" for identity in self._by_identity if identity not in self.policy
        ]
        if len(self.policy) != len(self._by_identity):
            found.append(f"the policy has {len(self.policy)} host pages, the cache {len(self._by_identity)}")
        erasing = self.manager.held_by(ERASE)
        held = {page for page in range(self.manager.total_pages) if self.manager.holders(page)}
        found += [f"host page {page} is held and unknown, or known and free" for page in held ^ self._pages.keys() ^ set(erasing)]
        unseen = (self._pages.keys() | set(erasing)) - self._last_use.keys()
        found += [f"host page {page} may have bytes, and would never be zeroed" for page in unseen]
        if list(self._last_use.values()) != sorted(self._last_use.values()):
            found.append("host pages are not in the order of their last use")
        return found
