"""Bookkeeping of one pool: which pages are free, who holds the others, where their content is. Ids only, no tensors."""

import heapq
from collections import Counter, defaultdict
from collections.abc import Iterable


class PageManager:
    """Owns the ids ``0 .. total_pages - 1`` of one pool.

    A page is free, or held by one or more *holders* (a Sequence, a copy in flight, a cache entry). It becomes free when its last
    holder lets go. Free pages are handed out lowest id first, so that a run's placement depends on its history alone.

    Not thread-safe on purpose: it belongs to the step loop; other threads report to it (PROTOCOL.md 6).
    """

    def __init__(self, total_pages: int) -> None:
        if total_pages < 1:
            raise ValueError(f"total_pages must be at least 1, not {total_pages}")
        self.total_pages = total_pages
        self.free_pages: list[int] = list(range(total_pages))  # sorted, hence a heap
        #: page -> "gpu" | "cpu" for held pages, "freed" for pages that were held once
        self.page_location: dict[int, str] = {}
        #: page -> its first holder, None once freed
        self.page_owner: dict[int, str | None] = {}
        self._holders: dict[int, list[str]] = {}
        #: the same by holder, so that letting go of a Sequence is not a walk over the pool
        self._held: defaultdict[str, Counter[int]] = defaultdict(Counter)
        self._alone: dict[str, int] = {}  # holder -> pages that nobody else holds

    def allocate(self, num_pages: int, owner: str, location: str = "gpu") -> list[int]:
        """Take ``num_pages`` free pages for ``owner``, all or none.

        Raises:
            MemoryError: fewer pages are free; nothing was taken.
        """
        if num_pages < 0:
            raise ValueError(f"num_pages must not be negative, not {num_pages}")
        if num_pages > len(self.free_pages):
            raise MemoryError(f"cannot allocate {num_pages} pages: {len(self.free_pages)} of {self.total_pages} are free")
        pages = [heapq.heappop(self.free_pages) for _ in range(num_pages)]
        self._give(pages, owner, location)
        return pages

    def take(self, page_ids: Iterable[int], owner: str, location: str = "gpu") -> None:
        """Take these very pages. One walk over the free ones, however many are taken.

        Raises:
            ValueError: one is not free, or named twice; nothing was taken.
        """
        pages = list(page_ids)
        wanted = set(pages)
        free = [page for page in self.free_pages if page not in wanted]
        if len(free) + len(pages) != len(self.free_pages):
            raise ValueError(f"not all of {pages} are free")
        heapq.heapify(free)
        self.free_pages = free
        self._give(pages, owner, location)

    def _give(self, pages: list[int], owner: str, location: str) -> None:
        for page in pages:
            self.page_location[page] = location
            self.page_owner[page] = owner
            self._holders[page] = [owner]
            self._held[owner][page] += 1
        self._count_alone(owner, len(pages))

    def share(self, page_ids: Iterable[int], owner: str) -> None:
        """Add ``owner`` as one more holder of each page, e.g. a copy that must not lose its source."""
        for page in self._checked(page_ids):
            holders = self._holders[page]
            if len(holders) == 1:
                self._count_alone(holders[0], -1)
            holders.append(owner)
            self._held[owner][page] += 1

    def free(self, page_ids: Iterable[int], owner: str | None = None) -> None:
        """``owner`` lets go of each page; pages nobody holds any more are free. Without ``owner`` a page must have one holder.

        Raises:
            ValueError: a page is not held (double free), not by ``owner``, or shared and no owner was named; nothing was changed.
        """
        pages = self._checked(page_ids)
        for page in pages:
            holders = self._holders[page]
            if owner is None and len(holders) > 1:
                raise ValueError(f"page {page} is shared by {holders}: name the owner that lets go")
            if owner is not None and owner not in holders:
                raise ValueError(f"page {page} is not held by {owner!r} but by {holders}")
        for page in pages:
            holders = self._holders[page]
            leaving = holders[0] if owner is None else owner
            holders.remove(leaving)
            self._forget(leaving, page)
            if holders:
                self.page_owner[page] = holders[0]
                if len(holders) == 1:
                    self._count_alone(holders[0], 1)
                continue
            self._count_alone(leaving, -1)
            del self._holders[page]
            self.page_location[page] = "freed"
            self.page_owner[page] = None
            heapq.heappush(self.free_pages, page)

    def swap_to(self, page_ids: Iterable[int], target: str) -> None:
        """Record that the content of held pages is now at ``target`` ("gpu" or "cpu")."""
        for page in self._checked(page_ids):
            self.page_location[page] = target

    def holders(self, page: int) -> tuple[str, ...]:
        return tuple(self._holders.get(page, ()))

    def held_by(self, owner: str) -> list[int]:
        return sorted(self._held.get(owner, ()))

    def held_alone_by(self, owner: str) -> int:
        """How many pages have ``owner`` as their only holder: those that become free when it lets go."""
        return self._alone.get(owner, 0)

    @property
    def free_count(self) -> int:
        return len(self.free_pages)

    @property
    def used_count(self) -> int:
        return self.total_pages - len(self.free_pages)

    def problems(self) -> list[str]:
        """What is inconsistent, in words; empty when all is well."""
        found = []
        free = set(self.free_pages)
        if len(free) != len(self.free_pages):
            found.append("a page is in the free list twice")
        found += [f"page {page} is free and held by {self._holders[page]}" for page in free & self._holders.keys()]
        by_holder = {owner: sorted(pages.elements()) for owner, pages in self._held.items()}
        expected: dict[str, list[int]] = {}
        for page, holders in sorted(self._holders.items()):
            for holder in holders:
                expected.setdefault(holder, []).append(page)
        if by_holder != expected:
            found.append(f"by holder: {by_holder}, by page: {expected}")
        alone = Counter(holders[0] for holders in self._holders.values() if len(holders) == 1)
        if alone != self._alone:
            found.append(f"pages with one holder: counted {self._alone}, there are {dict(alone)}")
        missing = set(range(self.total_pages)) - free - self._holders.keys()
        found += [f"page {page} is neither free nor held" for page in sorted(missing)]
        for page, holders in self._holders.items():
            if not holders or self.page_owner.get(page) != holders[0]:
                found.append(f"page {page}: owner {self.page_owner.get(page)!r} is not its first holder {holders}")
            if self.page_location.get(page) not in ("gpu", "cpu"):
                found.append(f"page {page} is held but located {self.page_location.get(page)!r}")
        return found

    def _count_alone(self, owner: str, change: int) -> None:
        count = self._alone.pop(owner, 0) + change
        if count:
            self._alone[owner] = count

    def _forget(self, owner: str, page: int) -> None:
        pages = self._held[owner]
        pages[page] -= 1
        if not pages[page]:
            del pages[page]
        if not pages:
            del self._held[owner]

    def _checked(self, page_ids: Iterable[int]) -> list[int]:
        pages = list(page_ids)
        if len(set(pages)) != len(pages):
            raise ValueError(f"a page is named twice in {pages}")
        for page in pages:
            if page not in self._holders:
                raise ValueError(f"page {page} is not held")
        return pages
