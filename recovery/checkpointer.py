"""Entries of the pool table: what the host cache filled or gives up, as writes for the job store.

The copies themselves, and who may read or write which host page when, are the engine's (``engine.host_cache``). What is added here
is that an entry outlives the process: it is published only for a page whose copy is complete, and a page is used again only after
the store answered that its entry is gone. Tokens never wait for pages: entries ride in whatever pipeline goes next.
"""

from collections.abc import Mapping, Sequence

from engine.host_cache import HostCache, HostState
from storage.records import PageEntry


class Checkpointer:
    """The step loop owns it. Without a host cache there is never anything to write."""

    def __init__(self, host: HostCache | None) -> None:
        self._host = host

    def adopt(self, entries: Mapping[int, PageEntry]) -> None:
        """The pool's table, read when we were registered: then a request that our last life sent late is refused."""
        if self._host is not None:
            self._host.adopt(as_table(entries), {page: entry.age for page, entry in entries.items()})

    @property
    def has_writes(self) -> bool:
        return self._host is not None and bool(self._host.ready or self._host.drops)

    def take_writes(self) -> tuple[dict[int, PageEntry], tuple[int, ...]]:
        """Entries to publish and host pages whose entries to drop, for the next pipeline. Give them back to ``written``."""
        if self._host is None:
            return {}, ()
        publish = {page.page: PageEntry(page.identity, page.checksum) for page in self._host.ready}
        drop = tuple(self._host.drops)
        self._host.ready, self._host.drops = [], []
        return publish, drop

    def written(self, publish: dict[int, PageEntry], drop: Sequence[int]) -> None:
        """The store answered: these entries are durable, those are gone."""
        if self._host is None:
            return
        for entry in publish.values():
            self._host.published(entry.identity)
        for page in drop:
            self._host.dropped(page)

    def not_written(self, publish: dict[int, PageEntry], drop: Sequence[int]) -> None:
        """The store refused the whole pipeline (we were declared dead): they ride in a later one. Both may be sent twice."""
        if self._host is None:
            return
        pages = [self._host.find(entry.identity) for entry in publish.values()]
        self._host.ready += [page for page in pages if page is not None and page.state is HostState.FILLED]
        self._host.drops += drop


def as_table(entries: Mapping[int, PageEntry]) -> dict[int, tuple[str, int]]:
    """The pool table as the host cache takes it."""
    return {page: (entry.identity, entry.checksum) for page, entry in entries.items()}
