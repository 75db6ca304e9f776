"""The engine's metrics, fed by its loop."""

import time
from dataclasses import dataclass

from prometheus_client import Counter

from engine.core import Engine, StepResult
from engine.sequence import Restart
from recovery.sequences import Held
from service.metrics import EngineMetrics
from storage.records import Commit, JobAnswer, StepAnswers


@dataclass(slots=True)
class Totals:
    """Since this life of the engine began: what the dashboard shows the differences of."""

    tokens: int = 0  #: committed
    steps: int = 0
    step_seconds: float = 0.0
    gaps: int = 0  #: between two tokens of a job
    gap_seconds: float = 0.0
    recovered: int = 0  #: jobs taken up again after a death of their owner
    pages_restored: int = 0
    tokens_replayed: int = 0


@dataclass(frozen=True, slots=True)
class _Taken:
    at: float  #: monotonic, when the job got its pages
    resumed: bool
    created_at: float  #: by the store's clock


def checkpoint_lag(engine: Engine) -> int:
    """Tokens that a crash now would make somebody replay."""
    running, residency, page_size = list(engine.scheduler.running), engine.residency, engine.cache.page_size
    if residency.copies is None:
        return sum(len(s.tokens) for s in running)
    return sum(len(s.tokens) - s.num_sealed * page_size for s in running) + residency.copies.pages_leaving * page_size


def _since(created_at: float) -> float:
    """Seconds since a moment of the store's clock, by ours: good enough for a histogram, and for nothing else."""
    return max(0.0, time.time() - created_at)


class EngineObserver:
    """Translates what the loop reports into counters and gauges. Times between tokens are by this process's clock."""

    def __init__(self, metrics: EngineMetrics, engine: Engine) -> None:
        self._metrics = metrics
        self._engine = engine
        self._last_token: dict[str, float] = {}
        self._taken: dict[str, _Taken] = {}
        self._counted: dict[Counter, float] = {}
        self.totals = Totals()
        self._watch(engine)

    def _watch(self, engine: Engine) -> None:
        """Gauges are read when they are asked for: an idle engine takes no step that could bring them up to date."""
        metrics, scheduler, cache, residency = self._metrics, engine.scheduler, engine.cache, engine.residency
        pages = cache.gpu_manager.total_pages

        def host_usage() -> float:
            return 0.0 if cache.host is None else cache.cpu_manager.used_count / cache.cpu_manager.total_pages

        def hidden() -> float:
            stats = residency.stats
            return max(0.0, 1.0 - stats.stall_seconds / stats.in_seconds) if stats.in_seconds else 1.0

        metrics.num_requests_running.set_function(lambda: len(scheduler.running))
        metrics.num_requests_waiting.set_function(lambda: len(scheduler.waiting) + len(scheduler.arriving))
        metrics.kv_cache_usage_perc.set_function(lambda: 1 - residency.available / pages)
        metrics.swap_hidden_ratio.set_function(hidden)
        metrics.host_pool_usage_perc.set_function(host_usage)
        metrics.checkpoint_lag_tokens.set_function(lambda: checkpoint_lag(engine))
        self._count_preemptions(StepResult())  # a series that is not there yet reads as an unknown metric
        for outcome in ("resumed", "replayed"):
            metrics.recoveries.labels(outcome)
        self._count_pages()

    def stepped(self, result: StepResult, seconds: float) -> None:
        if result.prompt_rows or result.generated_rows:
            self._metrics.step_seconds.observe(seconds)
            self.totals.steps += 1
            self.totals.step_seconds += seconds
            if result.attention_seconds:
                self._metrics.attention_seconds.observe(result.attention_seconds)
        self._count_preemptions(result)
        self._count_pages()

    def committed(self, answers: StepAnswers, commits: tuple[Commit, ...], seconds: float) -> None:
        now = time.monotonic()
        self._metrics.commit_seconds.observe(seconds)
        for commit, answer in zip(commits, answers.commits, strict=True):
            if not answer.accepted:
                continue
            self._metrics.generation_tokens.inc(len(commit.tokens))
            self.totals.tokens += len(commit.tokens)
            if commit.job_id not in self._taken:  # dropped while its commit was on the way
                continue
            before = self._last_token.get(commit.job_id)
            if before is not None:
                self._metrics.inter_token_latency.observe(now - before)
                self.totals.gaps += 1
                self.totals.gap_seconds += now - before
            else:
                self._first_commit(commit, now)
            self._last_token[commit.job_id] = now
            if commit.finish is not None:
                self._metrics.e2e_request_latency.observe(_since(self._taken[commit.job_id].created_at))
                self._forget(commit.job_id)

    def admitted(self, held: Held, restored_pages: int, restart: Restart) -> None:
        metrics, record = self._metrics, held.record
        self._taken[held.job_id] = _Taken(time.monotonic(), held.resumed, record.created_at)
        if not held.resumed:
            metrics.prompt_tokens.inc(len(record.prompt_token_ids))
            metrics.prefix_cache_queries.inc(len(record.prompt_token_ids))
            metrics.prefix_cache_hits.inc(restart.num_stored)
            if record.started_at is not None:
                metrics.request_queue_time.observe(max(0.0, record.started_at - record.created_at))
            return
        metrics.recoveries.labels("resumed" if restored_pages else "replayed").inc()
        metrics.recovery_tokens_replayed.inc(restart.replayed)
        metrics.recovery_pages_restored.inc(restored_pages)
        self.totals.recovered += 1
        self.totals.pages_restored += restored_pages
        self.totals.tokens_replayed += restart.replayed

    def dropped(self, job_id: str, reason: str) -> None:
        if reason == JobAnswer.FENCED:
            self._metrics.fenced_writes_rejected.inc()
        self._forget(job_id)

    def declared_dead(self) -> None:
        self._metrics.lease_lost.inc()

    def lost(self, tokens: int) -> None:
        self._metrics.tokens_lost.inc(tokens)

    def _first_commit(self, commit: Commit, now: float) -> None:
        taken = self._taken[commit.job_id]
        if taken.resumed:
            self._metrics.recovery_duration.observe(now - taken.at)
        else:
            self._metrics.time_to_first_token.observe(_since(taken.created_at))

    def _forget(self, job_id: str) -> None:
        self._taken.pop(job_id, None)
        self._last_token.pop(job_id, None)

    def _count_preemptions(self, result: StepResult) -> None:
        self._metrics.num_preemptions.labels("swap").inc(len(result.swapped_out))
        self._metrics.num_preemptions.labels("replay").inc(len(result.dropped))

    def _count_pages(self) -> None:
        """The engine counts for itself; Prometheus gets the differences."""
        metrics, residency = self._metrics, self._engine.residency
        stats, page_bytes = residency.stats, self._engine.cache.device.geometry.page_bytes
        out, come = stats.stored + stats.swapped_out, stats.swapped_in
        totals = {
            metrics.page_verify_failures: stats.verify_failures,
            metrics.pages_found.labels("device"): stats.found_on_device,
            metrics.pages_found.labels("host"): stats.found_on_host,
            metrics.pages_found.labels("nowhere"): stats.missing,
            metrics.page_faults: stats.faults,
            metrics.page_reads: stats.read,
            metrics.pages_copied_on_write: stats.copied_on_write,
            metrics.pages_unbacked: stats.unbacked,
            metrics.evictions.labels("device", residency.prefix.policy.name): residency.prefix.num_evictions,
            metrics.swapped_pages.labels("out"): out,
            metrics.swapped_pages.labels("in"): come,
            metrics.swapped_bytes.labels("out"): out * page_bytes,
            metrics.swapped_bytes.labels("in"): come * page_bytes,
            metrics.swap_seconds.labels("out"): stats.out_seconds,
            metrics.swap_seconds.labels("in"): stats.in_seconds,
            metrics.swap_stall_seconds: stats.stall_seconds,
        }
        if residency.host is not None:
            totals[metrics.evictions.labels("host", residency.host.policy.name)] = residency.host.num_evictions
        for counter, total in totals.items():
            counter.inc(total - self._counted.get(counter, 0))
            self._counted[counter] = total
