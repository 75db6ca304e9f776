"""Walk the whole engine and say what does not fit. Run by tests after each step and by the engine when idle."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.core import Engine


def problems(engine: "Engine") -> list[str]:
    """Everything inconsistent between Sequences, page tables and the device pool, in words; empty when all is well."""
    cache, scheduler = engine.cache, engine.scheduler
    found = cache.problems()
    running = {sequence.id: sequence for sequence in scheduler.running}
    waiting = {sequence.id for sequence in scheduler.waiting}
    known = set(engine.sequence_ids)
    found += [f"{sequence_id} is running and waiting" for sequence_id in running.keys() & waiting]
    found += [f"{sequence_id} is known but neither running nor waiting" for sequence_id in known - running.keys() - waiting]
    found += [f"{sequence_id} is scheduled but not known" for sequence_id in (running.keys() | waiting) - known]
    found += [f"{sequence_id} has pages but is not running" for sequence_id in cache.page_tables.keys() - running.keys()]
    tails: dict[int, str] = {}
    for sequence in running.values():
        table = cache.page_tables.get(sequence.id, [])
        if sequence.num_stored > len(table) * cache.page_size:
            found.append(f"{sequence.id}: {sequence.num_stored} rows stored in {len(table)} pages")
        # A restored page may hold the newest token's row already; that row is computed again for its logits.
        if sequence.num_sealed * cache.page_size > sequence.num_stored + 1:
            found.append(f"{sequence.id}: {sequence.num_sealed} sealed pages but {sequence.num_stored} rows")
        for page in table[sequence.num_sealed :]:
            if page in tails:
                found.append(f"page {page} is written by {tails[page]} and {sequence.id}")
            tails[page] = sequence.id
    return found


def check(engine: "Engine") -> None:
    """Raise AssertionError with every problem: an inconsistency here is our bug, never a user's."""
    found = problems(engine)
    assert not found, "engine invariants broken:\n  " + "\n  ".join(found)
