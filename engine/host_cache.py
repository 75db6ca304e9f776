"""What the host pool holds, by identity, with what is on its way in and out.

Life of a host page::

    free --prepare_store--> filling --complete_store--> filled --published--> published --evict--> dropping --dropped--> free
                               \\--(failed)--> gone

A page is written only while no entry of a durable table names it (free -> filling), an entry is published only for a page whose
copy is complete (filled -> published), and a page is used again only after the answer to dropping its entry (dropping -> free). A
host pool without a durable table skips the last two states. A page without identity holds what one Sequence swapped out: it is
never published and goes when that Sequence lets go.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from engine.eviction import EvictionPolicy
from engine.page_manager import PageManager

#: Holders of host pages beside Sequences: the cache itself, and each copy in flight.
ENTRY, COPY = "entry", "copy"


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
        table: Mapping[int, tuple[str, int]] | None = None,
        *,
        durable: bool = False,
        reserve: int = 0,
    ) -> None:
        """``table``: host page -> (identity, checksum), as an earlier life published it. ``reserve``: pages kept free, so that
        no copy waits for an eviction. ``durable``: entries live in a store that must answer before a page is used again."""
        self.manager = manager
        self.policy = policy
        self._durable = durable
        self._reserve = reserve
        self._by_identity: dict[str, HostPage] = {}
        self._private: dict[int, HostPage] = {}
        self._dropping: dict[int, HostPage] = {}
        self.ready: list[HostPage] = []  #: filled, to be published
        self.drops: list[int] = []  #: entries to be dropped
        self.num_evictions = 0
        self._adopt(dict(table or {}))

    def _adopt(self, table: dict[int, tuple[str, int]]) -> None:
        """Hold exactly the table's pages. Entries of pages that this pool does not have, and doubles, are dropped."""
        ours = {page: entry for page, entry in sorted(table.items()) if page < self.manager.total_pages}
        self.drops += sorted(table.keys() - ours.keys())
        if not ours:
            return
        for page in self.manager.allocate(max(ours) + 1, ENTRY, "cpu"):
            identity, checksum = ours.get(page, ("", 0))
            if not identity or identity in self._by_identity:
                self.manager.free([page], owner=ENTRY)
                if page in ours:
                    self.drops.append(page)
                continue
            self._by_identity[identity] = HostPage(page, identity, HostState.PUBLISHED, checksum)
            self.policy.insert(identity)

    def __len__(self) -> int:
        return len(self._by_identity)

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
        host_page = HostPage(page, identity)
        if identity:
            self.manager.share([page], ENTRY)
            self._by_identity[identity] = host_page
            self.policy.insert(identity)
        else:
            self._private[page] = host_page
        return host_page

    def complete_store(self, host_page: HostPage, checksum: int | None) -> None:
        """The copy ended; ``None``: it failed, nothing is known of the bytes, and no entry ever named the page."""
        self._unpin(host_page)
        if checksum is None:
            host_page.state = HostState.GONE
            if host_page.identity:
                del self._by_identity[host_page.identity]
                self.policy.discard(host_page.identity)
                self.manager.free([host_page.page], owner=ENTRY)
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
            if host_page.identity:
                self.policy.hit(host_page.identity)

    def let_go(self, host_page: HostPage, sequence_id: str) -> None:
        self.manager.free([host_page.page], owner=sequence_id)
        self._forget_free(host_page.page)

    def release(self, sequence_id: str) -> None:
        """The Sequence needs nothing here any more."""
        for page in self.manager.held_by(sequence_id):
            self.manager.free([page], owner=sequence_id)
            self._forget_free(page)

    # --- giving pages up ----------------------------------------------------------------------------------------------

    def make_room(self) -> None:
        """Keep the reserve free: what the policy names goes, never what backs a Sequence or is being copied."""
        for _ in range(self._reserve - self.free_count - len(self._dropping)):
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
        host_page = self._dropping.pop(page, None)
        if host_page is not None:
            host_page.state = HostState.GONE
            self.manager.free([page], owner=ENTRY)

    def _evictable(self, identity: str) -> bool:
        host_page = self._by_identity[identity]
        settled = HostState.PUBLISHED if self._durable else HostState.FILLED
        return host_page.state is settled and self.manager.holders(host_page.page) == (ENTRY,)

    def _give_up(self, host_page: HostPage) -> None:
        published = host_page.state is HostState.PUBLISHED
        del self._by_identity[host_page.identity]
        if self._durable:
            # Filled but not yet published: an entry may be on its way, so its drop goes behind it, through the same pipeline.
            host_page.state = HostState.DROPPING
            self._dropping[host_page.page] = host_page
            self.drops.append(host_page.page)
            if not published:
                self.ready = [page for page in self.ready if page is not host_page]
        else:
            host_page.state = HostState.GONE
            self.manager.free([host_page.page], owner=ENTRY)

    def _unpin(self, host_page: HostPage) -> None:
        self.manager.free([host_page.page], owner=COPY)
        self._forget_free(host_page.page)

    def _forget_free(self, page: int) -> None:
        if not self.manager.holders(page):
            self._private.pop(page, None)

    def problems(self) -> list[str]:
        """What is inconsistent, in words."""
        found = self.manager.problems() + self.policy.problems()
        named = {page.page: page for page in self._by_identity.values()}
        found += [f"host page {page} is named twice" for page in named.keys() & (self._private.keys() | self._dropping.keys())]
        found += [f"host page {page} is without its entry" for page in named if ENTRY not in self.manager.holders(page)]
        found += [
            f"{identity} is cached but unknown to the policy" for identity in self._by_identity if identity not in self.policy
        ]
        if len(self.policy) != len(self._by_identity):
            found.append(f"the policy has {len(self.policy)} host pages, the cache {len(self._by_identity)}")
        known = named.keys() | self._private.keys() | self._dropping.keys()
        held = {page for page in range(self.manager.total_pages) if self.manager.holders(page)}
        found += [f"host page {page} is held and unknown" for page in sorted(held - known - self._unreadable(held))]
        return found

    def _unreadable(self, pages: set[int]) -> set[int]:
        """Pages that only Sequences hold: of those the cache forgot because a copy failed or an entry went."""
        return {page for page in pages if not {ENTRY, COPY} & set(self.manager.holders(page))}
