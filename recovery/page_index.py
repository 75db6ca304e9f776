"""What the host pool holds, by identity: the pool's table in memory, with what is on its way in and out.

Life of a host page::

    free --take--> filling --filled--> filled --published--> published --evict--> dropping --dropped--> free
                      \\--failed--> free

A page is written only while no entry names it (free -> filling), an entry is published only for a page whose copy is complete
(filled -> published), and a page is used again only after the answer to dropping its entry (dropping -> free). That order is the
invariant of this package; everything else here is a cache policy.
"""

from collections import OrderedDict
from dataclasses import dataclass
from enum import StrEnum

from engine.page_manager import PageManager
from storage.records import PageEntry


class PageState(StrEnum):
    FILLING = "filling"
    FILLED = "filled"
    PUBLISHED = "published"
    DROPPING = "dropping"


@dataclass(slots=True)
class HostPage:
    page: int
    identity: str
    state: PageState
    checksum: int = 0


_ENTRY = "entry"


class PageIndex:
    """Bookkeeping only: ids, identities and states. Holders of a host page: its entry, and each Sequence it backs."""

    def __init__(self, manager: PageManager, table: dict[int, PageEntry]) -> None:
        self._manager = manager
        self._by_identity: OrderedDict[str, HostPage] = OrderedDict()  # least recently used first
        self._dropping: dict[int, HostPage] = {}
        self.stale: list[int] = []  #: entries of pages that this pool does not have, or a second page of one identity
        taken = {page: entry for page, entry in sorted(table.items()) if page < manager.total_pages}
        self.stale += sorted(table.keys() - taken.keys())
        if taken:
            self._take_exactly(taken)

    def _take_exactly(self, table: dict[int, PageEntry]) -> None:
        allocated = self._manager.allocate(max(table) + 1, _ENTRY, "cpu")
        for page in allocated:
            entry = table.get(page)
            if entry is None or entry.identity in self._by_identity:
                self._manager.free([page], owner=_ENTRY)
                if entry is not None:
                    self.stale.append(page)
                continue
            self._by_identity[entry.identity] = HostPage(page, entry.identity, PageState.PUBLISHED, entry.checksum)

    def __len__(self) -> int:
        return len(self._by_identity)

    @property
    def free_count(self) -> int:
        return self._manager.free_count

    def find(self, identity: str) -> HostPage | None:
        """The page with these bits, whatever its state; marks it as used just now."""
        page = self._by_identity.get(identity)
        if page is not None:
            self._by_identity.move_to_end(identity)
        return page

    def take(self, identity: str) -> HostPage | None:
        """A free host page to be filled, or None when there is none."""
        if not self._manager.free_count:
            return None
        (page,) = self._manager.allocate(1, _ENTRY, "cpu")
        entry = HostPage(page, identity, PageState.FILLING)
        self._by_identity[identity] = entry
        return entry

    def filled(self, page: HostPage, checksum: int) -> None:
        page.checksum = checksum
        page.state = PageState.FILLED

    def failed(self, page: HostPage) -> None:
        """Nothing usable was written: the page is free again, and no entry ever named it."""
        del self._by_identity[page.identity]
        for holder in self._manager.holders(page.page):
            self._manager.free([page.page], owner=holder)

    def published(self, page: HostPage) -> None:
        if page.state is PageState.FILLED:
            page.state = PageState.PUBLISHED

    def hold(self, page: HostPage, sequence_id: str) -> None:
        """While a Sequence that runs is backed by it, a page is not evicted."""
        if sequence_id not in self._manager.holders(page.page):
            self._manager.share([page.page], sequence_id)

    def release(self, sequence_id: str) -> None:
        self._manager.free(self._manager.held_by(sequence_id), owner=sequence_id)

    def evict(self, wanted: int) -> list[HostPage]:
        """Up to ``wanted`` of the least recently used published pages that back no Sequence. Drop their entries next."""
        victims: list[HostPage] = []
        for page in self._by_identity.values():
            if len(victims) == wanted:
                break
            if page.state is PageState.PUBLISHED and self._manager.holders(page.page) == (_ENTRY,):
                victims.append(page)
        for page in victims:
            self.condemn(page)
        return victims

    def condemn(self, page: HostPage) -> None:
        """Never use the page again (evicted, or its bytes do not verify): its entry is to be dropped."""
        page.state = PageState.DROPPING
        del self._by_identity[page.identity]
        self._dropping[page.page] = page

    @property
    def num_dropping(self) -> int:
        return len(self._dropping)

    def dropped(self, page: int) -> None:
        """The store answered that no entry names this page any more."""
        if self._dropping.pop(page, None) is not None:
            for holder in self._manager.holders(page):
                self._manager.free([page], owner=holder)
