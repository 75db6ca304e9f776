"""Walk the whole engine and say what does not fit. Run by tests after each step and by the engine when idle."""

from collections import Counter
from typing import TYPE_CHECKING

from engine.host_cache import COPY

if TYPE_CHECKING:
    from engine.core import Engine


def problems(engine: "Engine") -> list[str]:
    """Everything inconsistent between Sequences, page tables, caches and both pools, in words; empty when all is well."""
    cache, scheduler = engine.cache, engine.scheduler
    found = engine.residency.problems()
    places = Counter(s.id for s in (*scheduler.running, *scheduler.arriving, *scheduler.waiting))
    known = set(engine.sequence_ids)
    found += [f"{sequence_id} is scheduled {count} times" for sequence_id, count in places.items() if count > 1]
    found += [f"{sequence_id} is known but not scheduled" for sequence_id in known - places.keys()]
    found += [f"{sequence_id} is scheduled but not known" for sequence_id in places.keys() - known]
    present = {s.id for s in (*scheduler.running, *scheduler.arriving)}
    found += [f"{sequence_id} has pages but is not admitted" for sequence_id in cache.page_tables.keys() - present]
    found += [f"{sequence.id} runs but counts as swapped out" for sequence in scheduler.running if sequence.swapped]
    return found + _written_twice(engine)


def _written_twice(engine: "Engine") -> list[str]:
    """A page that is not sealed may be written: it is in one table, or its holders copy it before they write (``grow``)."""
    cache, found = engine.cache, []
    for sequence in engine.scheduler.running:
        table = cache.page_tables.get(sequence.id, [])
        if sequence.num_stored > len(table) * cache.page_size:
            found.append(f"{sequence.id}: {sequence.num_stored} rows stored in {len(table)} pages")
        # A restored page may hold the newest token's row already; that row is computed again for its logits.
        if sequence.num_sealed * cache.page_size > sequence.num_stored + 1:
            found.append(f"{sequence.id}: {sequence.num_sealed} sealed pages but {sequence.num_stored} rows")
        for index, page in enumerate(table[sequence.num_sealed :], sequence.num_sealed):
            others = set(cache.gpu_manager.holders(page)) - {sequence.id, COPY}
            # Forks share the tail of their prompt until one of them writes.
            if others and (index * cache.page_size >= sequence.num_prompt or others - cache.page_tables.keys()):
                found.append(f"page {page} is not sealed, {sequence.id} writes it and {sorted(others)} hold it")
    return found


def check(engine: "Engine") -> None:
    """Raise AssertionError with every problem: an inconsistency here is our bug, never a user's."""
    found = problems(engine)
    assert not found, "engine invariants broken:\n  " + "\n  ".join(found)
