"""The engine's loop: ``admit -> plan -> run -> sample``, one step at a time, read from top to bottom."""

import time
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from engine.cache import PagedKVCache
from engine.errors import GrammarFailed, InvalidRequest, RequestTooLarge, SequenceFailed
from engine.grammar import Grammars, GrammarState
from engine.invariants import check
from engine.output import OutputText
from engine.residency import Arrived, Failed, Residency
from engine.runner import Runner
from engine.sampler import Draw, Sampled, SamplingParams, sample_rows
from engine.scheduler import Budget, Scheduler, StepPlan, Work
from engine.sequence import FinishReason, Request, Restart, Sequence

_STALL_WAIT = 0.1  #: seconds that a step waits for a copy when nothing can be computed
_NO_HISTORY = (array("i"), array("i"))


@dataclass(frozen=True, slots=True)
class TokenOutput:
    """One new token. ``text`` became visible with it; the token that finishes carries all that was held back."""

    sequence_id: str
    index: int  #: among the generated tokens, from 0
    token: int
    text: str
    sampled: Sampled
    finish: FinishReason | None = None


@dataclass(frozen=True, slots=True)
class Admission:
    """A Sequence has its pages for the first time in this engine's life; ``restored_pages`` of them were not computed for it."""

    sequence_id: str
    restored_pages: int
    restart: Restart


@dataclass(frozen=True, slots=True)
class Failure:
    """A Sequence that can have no further token; it is not in the engine any more."""

    sequence_id: str
    error: SequenceFailed


@dataclass(slots=True)
class StepResult:
    outputs: list[TokenOutput] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    admissions: list[Admission] = field(default_factory=list)
    swapped_out: list[str] = field(default_factory=list)  #: preempted, every row kept
    dropped: list[str] = field(default_factory=list)  #: preempted, to be recomputed
    prompt_rows: int = 0
    generated_rows: int = 0
    attention_seconds: float = 0.0  #: of all layers; 0 on an accelerator


class Engine:
    """Runs Sequences over one DevicePool. One thread calls ``add``, ``abort`` and ``step``."""

    def __init__(
        self,
        runner: Runner,
        residency: Residency,
        tokenizer: Tokenizer,
        budget: Budget,
        *,
        max_context: int,
        eos_token_ids: frozenset[int],
    ) -> None:
        self._runner = runner
        self.residency = residency
        self.cache: PagedKVCache = residency.cache
        self._tokenizer = tokenizer
        self._max_context = max_context
        self._eos = eos_token_ids
        self.scheduler = Scheduler(residency, budget)
        self._sequences: dict[str, Sequence] = {}
        self._texts: dict[str, OutputText] = {}
        self._grammars = Grammars(tokenizer, runner.model.vocab_size, eos_token_ids, threads=runner.model.threads)
        self._grammar_states: dict[str, GrammarState] = {}  # of those that have one
        #: prompt and output of those with penalties, as the sampler takes them
        self._histories: dict[str, tuple[array[int], array[int]]] = {}
        self._result = StepResult()  # of the next step
        # The sampler's kernel is compiled, or loaded, here and not in the first step.
        sample_rows(np.zeros((1, 1), np.float32), [Draw(SamplingParams(seed=0), 0)], runner.model.threads)

    def add(self, request: Request) -> str:
        """Take a Sequence in; the text of the tokens it already has, rebuilt from them.

        Raises:
            InvalidRequest: empty prompt, nothing left to generate, or this id is here already.
            RequestTooLarge: longer than the context or than the whole pool.
            GrammarFailed: its grammar cannot be used, or is not that of its tokens.
        """
        self._validate(request)
        state = self._grammars.begin(request.grammar, request.generated_ids) if request.grammar else None
        text = OutputText(self._tokenizer, request.stop)
        visible = "".join(text.push(token).text for token in request.generated_ids)
        self._sequences[request.sequence_id] = Sequence(request)
        self._texts[request.sequence_id] = text
        if state is not None:
            self._grammar_states[request.sequence_id] = state
        if request.sampling.has_penalties:
            self._histories[request.sequence_id] = (array("i", request.prompt_ids), array("i", request.generated_ids))
        self.scheduler.add(self._sequences[request.sequence_id])
        return visible

    def abort(self, sequence_id: str) -> bool:
        """Drop a Sequence and its pages. False when it is not here (any more)."""
        sequence = self._sequences.pop(sequence_id, None)
        if sequence is None:
            return False
        del self._texts[sequence_id]
        self._grammar_states.pop(sequence_id, None)
        self._histories.pop(sequence_id, None)
        self.scheduler.remove(sequence)
        return True

    def clear_suspicion(self, sequence_id: str) -> None:
        """The Sequence made durable progress: it need not run alone any more."""
        if sequence_id in self._sequences:
            self._sequences[sequence_id].alone = False

    @property
    def sequence_ids(self) -> list[str]:
        return list(self._sequences)

    @property
    def has_work(self) -> bool:
        return bool(self._sequences)

    def step(self) -> StepResult:
        """Compute one round: at most one new token for every running Sequence. Copies between the pools run beside it."""
        self.collect()
        result, self._result = self._result, StepResult()
        self._admit(result)
        plan = self.scheduler.plan()
        for preempted in plan.preempted:
            (result.swapped_out if preempted.kept else result.dropped).append(preempted.sequence.id)
        if plan.is_empty:
            self._stall(result)
            return result
        self._count_reads(plan)
        slot = self._runner.model.slot
        before = slot.attention_seconds
        if plan.rows:
            self._run_rows(plan.rows, result)
        for chunk in plan.chunks:
            self._run_chunk(chunk, result)
        result.attention_seconds = slot.attention_seconds - before
        self.residency.flush()
        return result

    def collect(self) -> None:
        """Apply the copies that completed. ``step`` does; an engine without work needs it too, for its checkpoints."""
        self._take_arrivals(self.residency.collect(), self._result)

    def check(self) -> None:
        """Walk everything and raise AssertionError on what is inconsistent. Cheap enough to call whenever idle."""
        check(self)

    # --- steps of a step ---------------------------------------------------------------------------------------------

    def _validate(self, request: Request) -> None:
        if request.sequence_id in self._sequences:
            raise InvalidRequest(f"sequence {request.sequence_id} is already in this engine", "abort it first")
        if not request.prompt_ids:
            raise InvalidRequest("the prompt is empty", "give at least one token")
        if request.max_tokens <= len(request.generated_ids):
            raise InvalidRequest(
                f"nothing is left to generate: {len(request.generated_ids)} of max_tokens={request.max_tokens}", "finish it"
            )
        total = len(request.prompt_ids) + request.max_tokens
        if total > self._max_context:
            raise RequestTooLarge(
                f"prompt ({len(request.prompt_ids)}) + max_tokens ({request.max_tokens}) exceed the context ({self._max_context})",
                "shorten the prompt or lower max_tokens",
            )
        # The last token is never fed back, so it needs no slot.
        if self.cache.pages_for(total - 1) > self.cache.gpu_manager.total_pages:
            raise RequestTooLarge(
                f"{total} tokens need {self.cache.pages_for(total - 1)} pages, the device pool has "
                f"{self.cache.gpu_manager.total_pages}",
                "raise --device-pages",
            )

    def _admit(self, result: StepResult) -> None:
        while (admission := self.scheduler.next_admission()) is not None:
            sequence, sources = admission
            arrived = self.residency.admit(sequence, sources)
            self.scheduler.admitted(sequence)
            if arrived is not None:
                self._take_arrivals([arrived], result)

    def _take_arrivals(self, arrivals: list[Arrived | Failed], result: StepResult) -> None:
        for arrival in arrivals:
            if isinstance(arrival, Failed):
                self.scheduler.failed(arrival.sequence)
                continue
            self.scheduler.arrived(arrival.sequence)
            self._note_first_run(arrival.sequence, arrival.found, arrival.restart, result)

    def _note_first_run(self, sequence: Sequence, found: int, begin: Restart, result: StepResult) -> None:
        if sequence.first_run:
            sequence.first_run = False
            result.admissions.append(Admission(sequence.id, found, begin))

    def _stall(self, result: StepResult) -> None:
        """Nothing can be computed before a copy completes."""
        if self.residency.in_flight:
            self._take_arrivals(self.residency.wait(_STALL_WAIT), result)
        else:
            assert not self._sequences or result.dropped or result.swapped_out, "Sequences wait, and nothing would ever wake them"

    def _count_reads(self, plan: StepPlan) -> None:
        works = (*plan.rows, *plan.chunks)
        self.residency.stats.read += sum(self.cache.pages_for(work.end) for work in works)

    def _run_chunk(self, work: Work, result: StepResult) -> None:
        """One prompt chunk of one Sequence, in a call of its own: its shapes depend on the job alone."""
        sequence, began = work.sequence, time.perf_counter()
        # Already computed tokens take part in the chunk but are not written again: their pages may be shared.
        logits = self._runner.run_chunk(
            np.asarray(sequence.tokens[work.start : work.end], dtype=np.int64),
            work.start,
            self.cache.table_of(sequence.id),
            store_from=sequence.num_stored,
            want_logits=work.end == sequence.num_prompt and sequence.num_generated == 0,
        )
        result.prompt_rows += work.end - work.start
        self.residency.costs.computed_prompt(work.end - work.start, time.perf_counter() - began)
        self.residency.stored(sequence, work.end)
        if logits is not None:
            sequences = [*self._fork_twins(sequence, result), sequence]
            self._sample(sequences, np.broadcast_to(logits.numpy(), (len(sequences), len(logits))), result)

    def _fork_twins(self, sequence: Sequence, result: StepResult) -> list[Sequence]:
        """Those that wait with the very same prompt go on from its pages and its logits, each with its own sampling."""
        twins = self.scheduler.twins(sequence)
        for twin in twins:
            self.residency.fork(sequence, twin)
            self.scheduler.arrived(twin)
            self._note_first_run(twin, len(self.cache.page_tables[twin.id]), Restart(twin.num_prompt, replayed=0), result)
        return twins

    def _run_rows(self, works: list[Work], result: StepResult) -> None:
        """Generated rows of all Sequences in one call; several rows of one Sequence are a replay."""
        began = time.perf_counter()
        counts = np.array([work.end - work.start for work in works])
        ends = np.cumsum(counts)
        row_sequence = np.repeat(np.arange(len(works), dtype=np.int32), counts)
        # Rows are numbered through; a work's first is row ``end - count``, and stands at position ``work.start``.
        shift = np.array([work.end for work in works]) - ends
        positions = (np.arange(ends[-1]) + shift[row_sequence]).astype(np.int32)
        token_ids = np.array([token for work in works for token in work.sequence.tokens[work.start : work.end]], dtype=np.int64)
        sampling = [i for i, work in enumerate(works) if work.end == len(work.sequence.tokens)]
        logits = self._runner.run_rows(
            token_ids,
            positions,
            self.cache.tables_of([work.sequence.id for work in works]),
            row_sequence,
            (ends[sampling] - 1).astype(np.int32),
        ).numpy()
        result.generated_rows += len(token_ids)
        self.residency.costs.computed_generated(len(token_ids), time.perf_counter() - began)
        for work in works:
            self.residency.stored(work.sequence, work.end)
        self._sample([works[i].sequence for i in sampling], logits, result)

    def _sample(self, sequences: list[Sequence], logits: npt.NDArray[np.float32], result: StepResult) -> None:
        """One token each; a Sequence that can have none fails, and no other."""
        # Of a runner that gave other rows than it was asked for, the sampler would read memory that is nobody's logits.
        assert logits.shape == (len(sequences), self._runner.model.vocab_size), f"logits {logits.shape} of {len(sequences)} rows"
        draws = [self._draw(sequence) for sequence in sequences]
        rows = self._obey(sequences, sample_rows(logits, draws, self._runner.model.threads))
        for sequence, sampled in zip(sequences, rows, strict=True):
            if isinstance(sampled, SequenceFailed):
                result.failures.append(Failure(sequence.id, sampled))
                self.abort(sequence.id)
            else:
                self._append(sequence, sampled, result)

    def _draw(self, sequence: Sequence) -> Draw:
        sampling, index = sequence.request.sampling, sequence.num_generated
        suppress = self._eos if index < sampling.min_tokens else frozenset()
        prompt, generated = self._histories.get(sequence.id, _NO_HISTORY)
        state = self._grammar_states.get(sequence.id)
        return Draw(sampling, index, prompt, generated, suppress, None if state is None else state.allowed)

    def _obey(self, sequences: list[Sequence], rows: Iterable[Sampled | SequenceFailed]) -> list[Sampled | SequenceFailed]:
        """Move the grammars on by what was sampled; in the place of what a failed one has no token for, an error."""
        states = [self._grammar_states.get(sequence.id) for sequence in sequences]
        obeyed = [GrammarFailed(state.problem) if state and state.problem else row for state, row in zip(states, rows, strict=True)]
        chosen = [(state, row.token) for state, row in zip(states, obeyed, strict=True) if state and isinstance(row, Sampled)]
        if chosen:
            self._grammars.push(chosen)
        return obeyed

    def _append(self, sequence: Sequence, sampled: Sampled, result: StepResult) -> None:
        request, index = sequence.request, sequence.num_generated
        sequence.tokens.append(sampled.token)
        if sequence.id in self._histories:
            self._histories[sequence.id][1].append(sampled.token)
        output = self._texts[sequence.id]
        piece = output.push(sampled.token)
        state = self._grammar_states.get(sequence.id)
        finish: FinishReason | None = None
        if piece.stopped or (state is not None and state.ended) or (sampled.token in self._eos and not request.ignore_eos):
            finish = FinishReason.STOP
        elif sequence.num_generated >= request.max_tokens:
            finish = FinishReason.LENGTH
        text = piece.text if finish is None or piece.stopped else piece.text + output.flush()
        result.outputs.append(TokenOutput(sequence.id, index, sampled.token, text, sampled, finish))
        if finish is not None:
            self.abort(sequence.id)
