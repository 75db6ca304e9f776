"""What each page of both pools is used for just now, one letter for each: for people to look at. Ids only, no tensors.

No letter says whose a page is: who may see the map need not be asked who may see a job.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from engine.host_cache import COPY, ERASE, HostCache, HostPage, HostState
from engine.residency import Residency
from engine.sequence import Sequence

FREE = "."
# Device pages. A full one is a capital when the host pool has it with a durable entry: a crash does not cost it.
OPEN = "o"  #: in a page table, not full yet
SEALED = "s"  #: full, in one page table
SHARED = "h"  #: full, in several
CACHED = "c"  #: full, in none: evictable
LEAVING = "l"  #: in none, and pinned until its copy completes
# Host pages.
FILLING = "f"  #: being written
FILLED = "d"  #: complete, its entry not yet durable
BACKING = "B"  #: published, and a job on the device or waiting for it stands on it
PUBLISHED = "P"  #: published, and nobody needs it now
SWAPPED = "w"  #: rows of one preempted job, never published
GOING = "x"  #: its entry is being dropped, it holds nothing readable, or it is being zeroed

_IN_TABLES = (SEALED, SHARED)
_FULL = (SEALED, SHARED, CACHED)


@dataclass(frozen=True, slots=True)
class PageMap:
    """By page id. Without a host pool ``host`` is empty."""

    device: str
    host: str


def page_map(residency: Residency, present: Iterable[Sequence]) -> PageMap:
    """``present``: the Sequences that have pages, running and arriving."""
    host = residency.host
    return PageMap(_device(residency, present), "" if host is None else _host(host))


def _device(residency: Residency, present: Iterable[Sequence]) -> str:
    manager, host = residency.cache.gpu_manager, residency.host
    letters = [FREE] * manager.total_pages
    identities = dict(residency.prefix.identities)
    for page in identities:
        letters[page] = CACHED
    for sequence in present:
        for index, page in enumerate(residency.cache.page_tables[sequence.id]):
            if index < sequence.num_sealed and letters[page] == FREE:  # nobody else may use its bits, or another page has them
                identities[page] = sequence.identities[index] if index < len(sequence.identities) else ""
                letters[page] = SEALED
            else:
                letters[page] = OPEN if letters[page] not in _FULL else SHARED if letters[page] in _IN_TABLES else SEALED
    for page in manager.held_by(COPY):
        if letters[page] in (FREE, CACHED):
            letters[page] = LEAVING
    if host is not None:
        for page, identity in identities.items():
            copy = host.find(identity)
            if copy is not None and copy.state is HostState.PUBLISHED:
                letters[page] = letters[page].upper()
    return "".join(letters)


def _host(host: HostCache) -> str:
    letters = [FREE] * host.manager.total_pages
    for page in host.pages:
        letters[page.page] = _host_letter(host, page)
    for page_id in host.manager.held_by(ERASE):
        letters[page_id] = GOING
    return "".join(letters)


def _host_letter(host: HostCache, page: HostPage) -> str:
    if page.state is HostState.PUBLISHED:
        return BACKING if len(host.manager.holders(page.page)) > 1 else PUBLISHED
    if page.state is HostState.FILLING:
        return FILLING
    if page.state is HostState.FILLED:
        return FILLED if page.identity else SWAPPED
    return GOING
