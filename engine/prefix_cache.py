"""Sealed pages on the device, by identity: shared by the Sequences that have them in their tables, kept after the last one left.

Bookkeeping only. A cached page has the holder ``CACHE`` beside the Sequences that use it; one that nobody else holds is evictable.
Giving it up costs no copy: its bits are in the host pool already, or can be computed again.
"""

from collections.abc import Mapping

from engine.eviction import EvictionPolicy
from engine.page_manager import PageManager

CACHE = "cache"


class PrefixCache:
    """Which device page has which identity. The step loop owns it."""

    def __init__(self, manager: PageManager, policy: EvictionPolicy[str]) -> None:
        self.policy = policy
        self.num_evictions = 0
        self._manager = manager
        self._pages: dict[str, int] = {}
        self._identities: dict[int, str] = {}

    def __len__(self) -> int:
        return len(self._pages)

    @property
    def identities(self) -> Mapping[int, str]:
        """Device page -> identity, of all that are cached."""
        return self._identities

    @property
    def num_evictable(self) -> int:
        return self._manager.held_alone_by(CACHE)

    def find(self, identity: str) -> int | None:
        """The device page with these bits."""
        return self._pages.get(identity)

    def is_evictable(self, page: int) -> bool:
        return self._manager.holders(page) == (CACHE,)

    def insert(self, identity: str, page: int) -> None:
        """``page``, held and full, has these bits. A second page with the same bits stays its Sequence's own."""
        if identity in self._pages:
            return
        self._manager.share([page], CACHE)
        self._pages[identity] = page
        self._identities[page] = identity
        self.policy.insert(identity)

    def take(self, identity: str, holder: str) -> int:
        """One more holder of a cached page: an access."""
        page = self._pages[identity]
        self._manager.share([page], holder)
        self.policy.hit(identity)
        return page

    def let_go(self, pages: list[int], holder: str) -> None:
        """``holder``, which read these pages until now, needs them no more.

        The first page counts as read last: a prefix without its head is of no use to anybody, so tails go first.
        """
        for page in reversed(pages):
            if page in self._identities:
                self.policy.refresh(self._identities[page])
        self._manager.free(pages, owner=holder)

    def evict(self, incoming: str | None = None) -> bool:
        """Free one page, the policy's choice; False when every cached page is in use."""
        identity = self.policy.victim(incoming, lambda key: self.is_evictable(self._pages[key]))
        if identity is None:
            return False
        page = self._pages.pop(identity)
        del self._identities[page]
        self._manager.free([page], owner=CACHE)
        self.num_evictions += 1
        return True

    def problems(self) -> list[str]:
        """What is inconsistent, in words."""
        found = self.policy.problems()
        if {page: identity for identity, page in self._pages.items()} != self._identities:
            found.append("the prefix cache's two directions differ")
        if sorted(self._pages.values()) != self._manager.held_by(CACHE):
            found.append(f"cached pages {sorted(self._pages.values())}, held as such {self._manager.held_by(CACHE)}")
        if self._pages.keys() != {identity for identity in self._pages if identity in self.policy} or len(self.policy) != len(self):
            found.append("the prefix cache and its policy know different pages")
        return found
