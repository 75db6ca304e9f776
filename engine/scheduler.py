"""Who computes what in the next step: continuous batching, chunked prefill, preemption by dropping.

Deciding is apart from acting: ``plan`` reserves pages and names the work; ``Engine.step`` does it.
"""

from dataclasses import dataclass, field

from engine.cache import PagedKVCache
from engine.sequence import Sequence, chunk_start


@dataclass(frozen=True, slots=True)
class Budget:
    """Limits of one step. Whatever they are, no token's bits depend on them (DESIGN.md, exactness)."""

    max_running: int  #: Sequences on the device at once
    max_step_rows: int  #: generated rows (decode and replay) in one call
    max_step_tokens: int  #: prompt tokens in one step; one chunk always goes
    prefill_chunk: int  #: rows of a prompt chunk, aligned to the start of the prompt

    def __post_init__(self) -> None:
        if self.max_step_rows < self.max_running:
            raise ValueError(f"max_step_rows ({self.max_step_rows}) must be at least max_running ({self.max_running})")
        if self.prefill_chunk < 1:
            raise ValueError(f"prefill_chunk must be at least 1, not {self.prefill_chunk}")


@dataclass(frozen=True, slots=True)
class Work:
    """Compute rows ``start .. end - 1`` of a Sequence, as one prompt chunk or as generated rows."""

    sequence: Sequence
    start: int
    end: int


@dataclass(slots=True)
class StepPlan:
    chunks: list[Work] = field(default_factory=list)
    rows: list[Work] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)


class Scheduler:
    """Holds the waiting and the running Sequences. First come, first served within a priority."""

    def __init__(self, cache: PagedKVCache, budget: Budget) -> None:
        self._cache = cache
        self.budget = budget
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)
        self.waiting.sort(key=lambda s: s.rank)

    def remove(self, sequence: Sequence) -> None:
        """Forget a Sequence, wherever it is, and give its pages back."""
        if sequence in self.running:
            self.running.remove(sequence)
            self._cache.release(sequence.id)
        else:
            self.waiting.remove(sequence)

    def next_admission(self) -> Sequence | None:
        """The first waiting Sequence, if there is room for it now. The caller restores its pages and calls ``admit``.

        Only the head is considered: a smaller one behind it must not starve it.
        """
        if not self.waiting or len(self.running) >= self.budget.max_running:
            return None
        if any(s.alone for s in self.running):  # a suspect takes its next step before anybody joins
            return None
        head = self.waiting[0]
        # One page more than it has tokens for, so that it is not preempted by its own next page.
        needed = self._cache.pages_for(len(head.tokens)) + (1 if self.running else 0)
        return head if needed <= self._cache.gpu_manager.free_count else None

    def admit(self, sequence: Sequence) -> None:
        """Move a Sequence to the running ones; its page table covers its tokens from now on."""
        self._cache.reserve(sequence.id, len(sequence.tokens))
        self.waiting.remove(sequence)
        self.running.append(sequence)
        self.running.sort(key=lambda s: s.rank)

    def plan(self) -> StepPlan:
        plan = StepPlan()
        suspects = [s for s in self.running if s.alone]
        candidates = suspects[:1] or list(self.running)  # beside a suspect the others are held, not dropped
        for sequence in candidates:
            if sequence not in self.running:  # preempted for one that goes first
                continue
            if not self._make_room(sequence, plan):
                continue
        active = [s for s in candidates if s in self.running]
        self._plan_rows([s for s in active if not needs_chunk(s)], plan)
        self._plan_chunks([s for s in active if needs_chunk(s)], plan)
        return plan

    def _make_room(self, sequence: Sequence, plan: StepPlan) -> bool:
        """Reserve pages for every token the Sequence has, at the price of those that go after it."""
        while self._cache.missing_pages(sequence.id, len(sequence.tokens)) > self._cache.gpu_manager.free_count:
            victim = self.running[-1]
            self._preempt(victim, plan)
            if victim is sequence:
                return False
        self._cache.reserve(sequence.id, len(sequence.tokens))
        return True

    def _preempt(self, victim: Sequence, plan: StepPlan) -> None:
        self.running.remove(victim)
        self._cache.release(victim.id)
        victim.num_stored = 0
        victim.num_sealed = 0
        plan.preempted.append(victim)
        self.add(victim)

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
