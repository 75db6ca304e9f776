"""A Job's presence inside an engine."""

from dataclasses import dataclass, field
from enum import StrEnum

from engine.host_cache import HostPage
from engine.sampler import SamplingParams


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True)
class Request:
    """What an engine needs to know to go on with a job, from its first token or from any later one."""

    sequence_id: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    max_tokens: int
    generated_ids: tuple[int, ...] = ()  #: tokens that are committed already: never sampled again, only replayed
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    grammar: str = ""  #: of llguidance; empty allows everything
    priority: int = 0
    order: int = 0  #: first come, first served among equals
    alone: bool = False  #: suspected of killing engines: takes its next step with nobody else
    root: str = ""  #: identity before the first page (``identity.py``): what its pages may be shared with
    publishes: bool = True  #: False: it began under another arithmetic, so its new pages are nobody else's


@dataclass(slots=True, eq=False)
class Sequence:
    """Tokens and progress. ``tokens[:num_prompt]`` are the prompt; KV of ``tokens[:num_stored]`` is in the Sequence's pages."""

    request: Request
    tokens: list[int] = field(default_factory=list)
    num_stored: int = 0
    num_sealed: int = 0  #: leading pages that are full and will not change
    identities: list[str] = field(default_factory=list)  #: of its full pages, as far as they were asked for
    #: while it is preempted by swap: where its ``num_stored`` rows are, page by page
    swapped: tuple[HostPage, ...] | None = None
    replays: bool = False  #: it was preempted by dropping: copying its pages back would take longer than computing them
    alone: bool = False
    first_run: bool = True
    boost: int = 0  #: priority gained by waiting after a preemption
    preempted_at: int | None = None  #: step of the scheduler, while it waits after a preemption
    resident_since: int = 0  #: step of the scheduler in which it was admitted

    def __post_init__(self) -> None:
        self.tokens = [*self.request.prompt_ids, *self.request.generated_ids]
        self.alone = self.request.alone

    @property
    def id(self) -> str:
        return self.request.sequence_id

    @property
    def num_prompt(self) -> int:
        return len(self.request.prompt_ids)

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def generated(self) -> list[int]:
        return self.tokens[self.num_prompt :]

    @property
    def is_returning(self) -> bool:
        """It had tokens when it came, and got none since."""
        return self.num_generated == len(self.request.generated_ids) > 0

    @property
    def in_prompt(self) -> bool:
        return self.num_stored < self.num_prompt

    @property
    def rank(self) -> tuple[bool, int, int]:
        """Who goes first: suspects, by order, so that a crash is the first one's fault; then higher priority, then earlier order.

        A suspect that waited for pages behind others would be blamed for their crashes.
        """
        return (not self.alone, 0 if self.alone else -(self.request.priority + self.boost), self.request.order)


@dataclass(frozen=True, slots=True)
class Restart:
    """Where a Sequence goes on when its first ``restored_pages`` pages are there."""

    num_stored: int  #: rows whose KV counts as present
    replayed: int  #: rows that are computed again before the row that yields the next new token


def chunk_start(row: int, prefill_chunk: int) -> int:
    """First row of the prompt chunk that ``row`` belongs to: chunks are aligned to the start of the prompt."""
    return row - row % prefill_chunk


def restart(num_prompt: int, num_generated: int, restored_pages: int, *, page_size: int, prefill_chunk: int) -> Restart:
    """The arithmetic of going on, shared by the engine (which does it) and the recovery plan (which foretells it).

    A prompt chunk is recomputed whole even when some of its pages survived, since its shape is part of its bits. The row of the
    newest token (or, before the first token, the last prompt row) yields the next logits: computing it is progress, not replay.
    """
    next_row = num_prompt + num_generated - 1
    stored = min(restored_pages * page_size, next_row if num_generated else num_prompt)
    first = stored
    if stored < num_prompt or not num_generated:
        first = chunk_start(min(stored, num_prompt - 1), prefill_chunk)
    return Restart(num_stored=stored, replayed=next_row - first)
