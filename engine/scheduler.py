"""Who computes what in the next step: continuous batching, chunked prefill, admission by pages, preemption.

Deciding is apart from acting: ``plan`` reserves pages and names the work; ``Engine.step`` does it. Three rules keep it from
thrashing when there are more jobs than pages: a Sequence is admitted only where all that run can grow for ``min_resident_steps``
more steps; one that was just brought in goes last; one that was preempted ages upward while it waits.
"""

from dataclasses import dataclass, field
from enum import StrEnum

from engine.residency import Residency, Source
from engine.sequence import Sequence, chunk_start

AGING_STEPS = 128  #: waiting this many steps after a preemption is worth one level of priority


class Preemption(StrEnum):
    """What is done with the rows of a Sequence that is taken off the device. No token's bits depend on it."""

    AUTO = "auto"  #: whichever was measured to cost less for this Sequence
    SWAP = "swap"  #: copy out what the host pool does not have, bring all of it back
    REPLAY = "replay"  #: drop and recompute


@dataclass(frozen=True, slots=True)
class Budget:
    """Limits of one step. Whatever they are, no token's bits depend on them (DESIGN.md, exactness)."""

    max_running: int  #: Sequences on the device at once
    max_step_rows: int  #: generated rows (decode and replay) in one call
    max_step_tokens: int  #: prompt tokens in one step; one chunk always goes
    prefill_chunk: int  #: rows of a prompt chunk, aligned to the start of the prompt
    preemption: Preemption = Preemption.AUTO
    min_resident_steps: int = 32  #: how long a Sequence that is brought in can stay before anybody runs out of pages

    def __post_init__(self) -> None:
        if self.max_step_rows < self.max_running:
            raise ValueError(f"max_step_rows ({self.max_step_rows}) must be at least max_running ({self.max_running})")
        if self.prefill_chunk < 1:
            raise ValueError(f"prefill_chunk must be at least 1, not {self.prefill_chunk}")
        if self.min_resident_steps < 1:
            raise ValueError(f"min_resident_steps must be at least 1, not {self.min_resident_steps}")


@dataclass(frozen=True, slots=True)
class Work:
    """Compute rows ``start .. end - 1`` of a Sequence, as one prompt chunk or as generated rows."""

    sequence: Sequence
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Preempted:
    sequence: Sequence
    kept: bool  #: every row it had; else they are dropped


@dataclass(slots=True)
class StepPlan:
    chunks: list[Work] = field(default_factory=list)
    rows: list[Work] = field(default_factory=list)
    preempted: list[Preempted] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        return not (self.chunks or self.rows)


class Scheduler:
    """Holds the waiting, the arriving and the running Sequences. First come, first served within a priority."""

    def __init__(self, residency: Residency, budget: Budget) -> None:
        self._residency = residency
        self._cache = residency.cache
        self.budget = budget
        self.waiting: list[Sequence] = []
        self.arriving: list[Sequence] = []  #: have their pages, whose content is on its way
        self.running: list[Sequence] = []
        self._steps = 0

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)
        self.waiting.sort(key=lambda s: s.rank)

    def remove(self, sequence: Sequence) -> None:
        """Forget a Sequence, wherever it is, and give its pages back."""
        self._take_out(sequence)
        self._residency.release(sequence)

    # --- coming in ----------------------------------------------------------------------------------------------------

    def next_admission(self) -> tuple[Sequence, list[Source]] | None:
        """The first waiting Sequence, and where its pages are, if there is room for it now.

        A smaller one behind it must not starve it. But one whose pages somebody else is just making lets others pass: it waits
        for something that comes for sure, and making them twice would take longer.
        """
        if len(self.running) + len(self.arriving) >= self.budget.max_running:
            return None
        if any(s.alone for s in (*self.running, *self.arriving)):  # a suspect takes its next step before anybody joins
            return None
        for sequence in self.waiting:
            sources = self._residency.locate(sequence)
            if sources is None or self._residency.awaits_another(sequence, sources):
                continue
            return (sequence, sources) if self._has_room(sequence, sources) else None
        return None

    def _has_room(self, sequence: Sequence, sources: list[Source]) -> bool:
        needed = self._residency.admission_cost(sequence, sources)
        present = (*self.running, *self.arriving)
        if present:
            tables = self._cache.page_tables
            needed += self._pages_ahead(sequence) - self._cache.pages_for(len(sequence.tokens))
            needed += sum(max(0, self._pages_ahead(s) - len(tables[s.id])) for s in present)
        return needed <= self._residency.available

    def _pages_ahead(self, sequence: Sequence) -> int:
        """Pages that the Sequence has ``min_resident_steps`` from now; its last token is never fed back."""
        last = sequence.num_prompt + sequence.request.max_tokens - 1
        return self._cache.pages_for(max(len(sequence.tokens), min(len(sequence.tokens) + self.budget.min_resident_steps, last)))

    def admitted(self, sequence: Sequence) -> None:
        """The Sequence has its pages; it runs when their content is there."""
        self.waiting.remove(sequence)
        self.arriving.append(sequence)

    def arrived(self, sequence: Sequence) -> None:
        if sequence in self.waiting:  # a fork: it never had to arrive
            self.waiting.remove(sequence)
        else:
            self.arriving.remove(sequence)
        sequence.preempted_at = None
        sequence.resident_since = self._steps
        self.running.append(sequence)
        self.running.sort(key=lambda s: s.rank)

    def failed(self, sequence: Sequence) -> None:
        """Its pages did not come in whole: it waits again, for what is left of them."""
        self.arriving.remove(sequence)
        self.add(sequence)

    def twins(self, sequence: Sequence) -> list[Sequence]:
        """Waiting Sequences with the very prompt that this one has just computed, as far as there is room for them."""
        request = sequence.request
        room = self.budget.max_running - len(self.running) - len(self.arriving)
        if sequence.alone or room < 1:
            return []
        twins = [
            s
            for s in self.waiting
            if not (s.alone or s.num_generated or s.swapped)
            and (s.request.root, s.request.publishes) == (request.root, request.publishes)
            and s.request.prompt_ids == request.prompt_ids
        ]
        ahead = sum(max(0, self._pages_ahead(s) - len(self._cache.page_tables[s.id])) for s in (*self.running, *self.arriving))
        each = self._pages_ahead(sequence) - sequence.num_prompt // self._cache.page_size  # its tail is copied once it writes
        return twins[: max(0, min(room, (self._residency.available - ahead) // max(1, each)))]

    # --- the next step ------------------------------------------------------------------------------------------------

    def plan(self) -> StepPlan:
        self._steps += 1
        self._age()
        plan = StepPlan()
        candidates = self._candidates()
        active = [s for s in candidates if s in self.running and self._make_room(s, plan)]
        active = [s for s in active if s in self.running]  # not preempted for one that goes first
        self._plan_rows([s for s in active if not needs_chunk(s)], plan)
        self._plan_chunks([s for s in active if needs_chunk(s)], plan)
        return plan

    def _candidates(self) -> list[Sequence]:
        """Who may compute in this step. The others keep their pages.

        A suspect does so alone. And of Sequences that come back one after the other those that have a token already would take the
        processors from the copies and replays of the rest: a step that can complete some is for these only.
        """
        suspects = [s for s in self.running if s.alone]
        tail = 2 * self._cache.page_size  # a page that was not full, and one whose copy was still on its way
        returning = [s for s in self.running if s.is_returning and len(s.tokens) - s.num_stored <= tail]
        return suspects[:1] or returning or list(self.running)

    def _age(self) -> None:
        """Who was preempted rises while it waits, and keeps what it gained: no stream of others can starve it."""
        for sequence in self.waiting:
            if sequence.preempted_at is not None and self._steps - sequence.preempted_at >= AGING_STEPS:
                sequence.boost += 1
                sequence.preempted_at = self._steps
        self.waiting.sort(key=lambda s: s.rank)

    def _make_room(self, sequence: Sequence, plan: StepPlan) -> bool:
        """Pages for every token the Sequence has, at the price of those that go after it. False: not in this step."""
        residency = self._residency
        while (needed := residency.growth(sequence)) > residency.available:
            if needed <= residency.available + residency.leaving:
                return False  # pages of the last one preempted are still being copied out
            victim = self._victim(sequence)
            self._preempt(victim, plan)
            if victim is sequence:
                return False
        residency.grow(sequence)
        return True

    def _victim(self, needy: Sequence) -> Sequence:
        """Of those that go after the needy one, the last; but one that was just brought in only when there is no other."""
        behind = [s for s in (*self.running, *self.arriving) if s.rank > needy.rank]
        return max(behind, key=lambda s: (not self._just_came(s), s.rank), default=needy)

    def _just_came(self, sequence: Sequence) -> bool:
        return sequence in self.arriving or self._steps - sequence.resident_since < self.budget.min_resident_steps

    def _preempt(self, victim: Sequence, plan: StepPlan) -> None:
        kept = victim in self.arriving
        self._take_out(victim)
        if kept:
            self._residency.abandon(victim)
        else:
            kept = self._prefers_swap(victim) and self._residency.swap_out(victim)
            if not kept:
                self._residency.drop(victim)
        victim.preempted_at = self._steps
        plan.preempted.append(Preempted(victim, kept))
        self.add(victim)

    def _prefers_swap(self, victim: Sequence) -> bool:
        if self.budget.preemption is not Preemption.AUTO:
            return self.budget.preemption is Preemption.SWAP
        costs, pages = self._residency.costs, self._cache.pages_for(victim.num_stored)
        prompt_rows = min(victim.num_stored, victim.num_prompt)
        replay = costs.replay_seconds(prompt_rows, victim.num_stored - prompt_rows)
        return costs.swap_seconds(pages - victim.num_sealed, pages) <= replay

    def _take_out(self, sequence: Sequence) -> None:
        for place in (self.running, self.arriving, self.waiting):
            if sequence in place:
                place.remove(sequence)

    def _plan_rows(self, sequences: list[Sequence], plan: StepPlan) -> None:
        """One row for each Sequence that decodes; what is left of the budget replays, in order."""
        left = self.budget.max_step_rows - len(sequences)
        for sequence in sequences:
            pending = len(sequence.tokens) - sequence.num_stored
            extra = min(pending - 1, left)
            left -= extra
            plan.rows.append(Work(sequence, sequence.num_stored, sequence.num_stored + 1 + extra))

    def _plan_chunks(self, sequences: list[Sequence], plan: StepPlan) -> None:
        left = self.budget.max_step_tokens
        for sequence in sequences:
            start, end = next_chunk(sequence, self.budget.prefill_chunk)
            if plan.chunks and end - start > left:
                return
            left -= end - start
            plan.chunks.append(Work(sequence, start, end))


def needs_chunk(sequence: Sequence) -> bool:
    """Prompt rows are missing, or all were restored but the first token's logits were not."""
    return sequence.in_prompt or sequence.num_generated == 0


def next_chunk(sequence: Sequence, prefill_chunk: int) -> tuple[int, int]:
    """The prompt chunk to compute next, from its first row even when some of its pages are there: its shape is part of its bits."""
    start = chunk_start(min(sequence.num_stored, sequence.num_prompt - 1), prefill_chunk)
    return start, min(start + prefill_chunk, sequence.num_prompt)
