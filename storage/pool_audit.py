"""Checks the pool's half of the invariant of DESIGN.md: no entry names a page that the file does not hold, bit for bit."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from storage.codec import page_entry
from storage.findings import Check, Finding, Severity
from storage.pool_header import PoolHeader
from storage.pool_reader import PoolReader
from storage.records import EngineInfo, PageEntry

Entries = dict[int, PageEntry]  #: host page -> what its pool's table says of it
_PAGES_AT_ONCE = 32
_RECOMPUTED = "nothing: its page is recomputed from the log and the entry dropped at the next start"
_REPLACED = "nothing: the next start of the engine makes this right, and recomputes the pages"


def read_table(raw: Mapping[str, str]) -> tuple[Entries, list[Finding]]:
    """The entries that can be read, and what is wrong with the others: host page -> "identity checksum"."""
    table: Entries = {}
    findings = []
    for page, text in raw.items():
        try:
            table[int(page)] = page_entry(text)
        except ValueError:
            what = f"its entry in the pool's table cannot be read: {text!r}; the engine would not start"
            findings.append(Finding(Severity.DAMAGE, Check.POOL, where(page), what, f"HDEL the field {page} of the pool's table"))
    return table, findings


def table_findings(table: Mapping[int, PageEntry], num_pages: int) -> Iterator[Finding]:
    seen: dict[str, int] = {}
    for page, entry in sorted(table.items()):
        if not 0 <= page < num_pages:
            yield Finding(Severity.REPAIRABLE, Check.POOL, where(page), f"the pool file has {num_pages} pages", _RECOMPUTED)
        if (first := seen.setdefault(entry.identity, page)) != page:
            what = f"has the identity of host page {first}: one of them is of no use"
            yield Finding(Severity.REPAIRABLE, Check.POOL, where(page), what, _RECOMPUTED)


def header_findings(header: PoolHeader, engine: EngineInfo) -> Iterator[Finding]:
    """Is this the file of the engine that is registered from this directory?"""
    if header.pool_id != engine.pool_id:
        what = f"is pool {header.pool_id}, the engine registered with {engine.pool_id or 'none'}: no page of it is used"
        yield Finding(Severity.REPAIRABLE, Check.POOL, "pool.safetensors", what, _REPLACED)
    if header.model_fingerprint != engine.model_fingerprint:
        what = f"holds pages of model {header.model_fingerprint}, the engine registered with {engine.model_fingerprint}"
        yield Finding(Severity.REPAIRABLE, Check.POOL, "pool.safetensors", what, _REPLACED)


def bad_pages(reader: PoolReader, table: Mapping[int, PageEntry], on_pages: Callable[[int], None] = lambda _: None) -> list[int]:
    """Pages of the file whose bytes do not have the checksum of their entry, as fast as the processors hash.

    ``on_pages`` hears how many were read so far.
    """
    pages = sorted(page for page in table if 0 <= page < reader.header.num_pages)

    def check(part: Sequence[int]) -> list[int]:
        return [page for page in part if not reader.page_ok(page, table[page])]

    parts = [pages[at : at + _PAGES_AT_ONCE] for at in range(0, len(pages), _PAGES_AT_ONCE)]
    found: list[int] = []
    read = 0
    with ThreadPoolExecutor(len(os.sched_getaffinity(0)), "pages") as threads:
        for part, bad in zip(parts, threads.map(check, parts), strict=True):
            found += bad
            read += len(part)
            on_pages(read)
    return found


def page_finding(page: int) -> Finding:
    what = "its bytes do not have the checksum of its entry"
    return Finding(Severity.REPAIRABLE, Check.PAGE, where(page), what, f"{_RECOMPUTED}; more than one: check the disk")


def where(page: int | str) -> str:
    return f"host page {page}"
