"""The spans of jobs in one life of an engine (``service/tracing.py`` says how they hang together). An Observer of the loop."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.core import StepResult
from engine.sequence import Restart
from recovery.sequences import Held
from service.tracing import Tracing, life_of, trace_of
from service.worker.state import Observer
from storage.records import Commit, JobStatus, StepAnswers

if TYPE_CHECKING:
    from opentelemetry.trace import Span


@dataclass(slots=True)
class _Life:
    start: "Span"
    fence: int
    run: "Span | None" = None  #: None until the first token of this life is committed
    tokens: int = 0


class JobSpans:
    """Make it only where tracing is on."""

    def __init__(self, tracing: Tracing, engine_id: str) -> None:
        self._tracing = tracing
        self._engine_id = engine_id
        self._lives: dict[str, _Life] = {}

    def stepped(self, result: StepResult, seconds: float) -> None:
        pass

    def admitted(self, held: Held, restored_pages: int, restart: Restart) -> None:
        life = self._lives.get(held.job_id)
        if life is not None and life.fence == held.owned.fence:
            (life.run or life.start).add_event("resumed after a preemption", {"midsentence.tokens.replayed": restart.replayed})
            return
        if life is not None:
            self._end(held.job_id, "lost")
        self._lives[held.job_id] = _Life(self._start(held, restored_pages, restart), held.owned.fence)

    def committed(self, answers: StepAnswers, commits: tuple[Commit, ...], seconds: float) -> None:
        for commit, answer in zip(commits, answers.commits, strict=True):
            life = self._lives.get(commit.job_id)
            if life is None or not answer.accepted:
                continue
            life.tokens += len(commit.tokens)
            if life.run is None:
                self._first_token(commit.job_id, life)
            if commit.finish is not None:
                self._end(commit.job_id, commit.finish.status)

    def dropped(self, job_id: str, reason: str) -> None:
        self._end(job_id, reason)

    def declared_dead(self) -> None:
        pass  # each of its jobs is dropped, too

    def lost(self, tokens: int) -> None:
        pass  # such a job never got its place

    def close(self) -> None:
        """The drain: jobs that are held go back to the queue."""
        for job_id in list(self._lives):
            self._end(job_id, "released")
        self._tracing.close()

    def _start(self, held: Held, restored_pages: int, restart: Restart) -> "Span":
        from opentelemetry.trace import Link, SpanContext, SpanKind, get_current_span
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        record, fence = held.record, held.owned.fence
        parent = TraceContextTextMapPropagator().extract({"traceparent": record.traceparent} if record.traceparent else {})
        trace_id = get_current_span(parent).get_span_context().trace_id or trace_of(record.job_id)
        before = SpanContext(trace_id, life_of(record.job_id, fence - 1), is_remote=True)
        self._tracing.ids.choose(trace_id, life_of(record.job_id, fence))
        about: dict[str, str | int] = {
            "midsentence.job.id": record.job_id,
            "midsentence.request.id": record.request_id,
            "midsentence.engine.id": self._engine_id,
            "midsentence.job.fence": fence,
            "midsentence.job.recoveries": record.recoveries,
            "midsentence.job.resumed": held.resumed,
            "midsentence.tokens.prompt": len(record.prompt_token_ids),
            "midsentence.tokens.logged": record.log_length,
            "midsentence.tokens.replayed": restart.replayed if held.resumed else 0,
            "midsentence.pages.restored": restored_pages,
        }
        links = [Link(before)] if fence > 1 else []
        return self._tracing.tracer.start_span("start job", parent, SpanKind.CONSUMER, about, links)

    def _first_token(self, job_id: str, life: _Life) -> None:
        from opentelemetry.trace import set_span_in_context

        life.start.end()
        about: dict[str, str | int] = {"midsentence.job.id": job_id, "midsentence.job.fence": life.fence}
        life.run = self._tracing.tracer.start_span("run job", set_span_in_context(life.start), attributes=about)

    def _end(self, job_id: str, outcome: str) -> None:
        from opentelemetry.trace import StatusCode

        life = self._lives.pop(job_id, None)
        if life is None:
            return
        span = life.run or life.start
        span.set_attributes({"midsentence.job.outcome": str(outcome), "midsentence.tokens.generated": life.tokens})
        if outcome == JobStatus.FAILED:
            span.set_status(StatusCode.ERROR)
        span.end()


class Observers:
    """Tells each of several."""

    def __init__(self, *observers: Observer) -> None:
        self._observers = observers

    def stepped(self, result: StepResult, seconds: float) -> None:
        for each in self._observers:
            each.stepped(result, seconds)

    def committed(self, answers: StepAnswers, commits: tuple[Commit, ...], seconds: float) -> None:
        for each in self._observers:
            each.committed(answers, commits, seconds)

    def admitted(self, held: Held, restored_pages: int, restart: Restart) -> None:
        for each in self._observers:
            each.admitted(held, restored_pages, restart)

    def dropped(self, job_id: str, reason: str) -> None:
        for each in self._observers:
            each.dropped(job_id, reason)

    def declared_dead(self) -> None:
        for each in self._observers:
            each.declared_dead()

    def lost(self, tokens: int) -> None:
        for each in self._observers:
            each.lost(tokens)
