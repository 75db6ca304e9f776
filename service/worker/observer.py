"""The engine's metrics, fed by its loop."""

import time

from engine.core import Engine, StepResult
from engine.sequence import Restart
from recovery.checkpointer import Checkpointer, CheckpointStats
from recovery.sequences import Held
from service.metrics import EngineMetrics
from storage.records import Commit, JobAnswer, StepAnswers


class EngineObserver:
    """Translates what the loop reports into counters and gauges. Times between tokens are by this process's clock."""

    def __init__(self, metrics: EngineMetrics, engine: Engine, checkpointer: Checkpointer) -> None:
        self._metrics = metrics
        self._engine = engine
        self._checkpointer = checkpointer
        self._last_token: dict[str, float] = {}
        self._taken: dict[str, tuple[float, bool]] = {}  # job -> when it was admitted, whether that was a recovery
        self._counted = CheckpointStats()

    def stepped(self, result: StepResult, seconds: float) -> None:
        metrics, scheduler, cache = self._metrics, self._engine.scheduler, self._engine.cache
        metrics.step_seconds.observe(seconds)
        metrics.num_preemptions.inc(len(result.preempted))
        metrics.num_requests_running.set(len(scheduler.running))
        metrics.num_requests_waiting.set(len(scheduler.waiting))
        metrics.kv_cache_usage_perc.set(cache.gpu_manager.used_count / cache.gpu_manager.total_pages)
        metrics.host_pool_usage_perc.set(cache.cpu_manager.used_count / cache.cpu_manager.total_pages)
        unsealed = sum(len(s.tokens) - s.num_sealed * cache.page_size for s in scheduler.running)
        metrics.checkpoint_lag_tokens.set(unsealed + self._checkpointer.in_flight * cache.page_size)
        self._count_pages()

    def committed(self, answers: StepAnswers, commits: tuple[Commit, ...], seconds: float) -> None:
        now = time.monotonic()
        self._metrics.commit_seconds.observe(seconds)
        for commit, answer in zip(commits, answers.commits, strict=True):
            if not answer.accepted:
                continue
            self._metrics.generation_tokens.inc(len(commit.tokens))
            before = self._last_token.get(commit.job_id)
            if before is not None:
                self._metrics.inter_token_latency.observe(now - before)
            elif commit.job_id in self._taken:
                self._first_commit(commit, now)
            self._last_token[commit.job_id] = now
            if commit.finish is not None:
                self._gone(commit.job_id)

    def admitted(self, held: Held, restored_pages: int, restart: Restart) -> None:
        metrics, record = self._metrics, held.record
        self._taken[held.job_id] = (time.monotonic(), held.resumed)
        if not held.resumed:
            metrics.prompt_tokens.inc(len(record.prompt_token_ids))
            metrics.prefix_cache_hits.inc(restart.num_stored)
            if record.started_at is not None:
                metrics.request_queue_time.observe(max(0.0, record.started_at - record.created_at))
            return
        metrics.recoveries.labels("resumed" if restored_pages else "replayed").inc()
        metrics.recovery_tokens_replayed.inc(restart.replayed)
        metrics.recovery_pages_restored.inc(restored_pages)

    def dropped(self, job_id: str, reason: str) -> None:
        if reason in (JobAnswer.FENCED, "not_listed"):
            self._metrics.fenced_writes_rejected.inc()
        elif reason == "declared_dead":
            self._metrics.lease_lost.inc()
        self._gone(job_id)

    def lost(self, tokens: int) -> None:
        self._metrics.tokens_lost.inc(tokens)

    def _first_commit(self, commit: Commit, now: float) -> None:
        taken_at, resumed = self._taken[commit.job_id]
        if resumed:
            self._metrics.recovery_duration.observe(now - taken_at)
        else:
            self._metrics.time_to_first_token.observe(now - taken_at)

    def _gone(self, job_id: str) -> None:
        taken = self._taken.pop(job_id, None)
        if taken is not None:
            self._metrics.e2e_request_latency.observe(time.monotonic() - taken[0])
        self._last_token.pop(job_id, None)

    def _count_pages(self) -> None:
        """The checkpointer counts for itself; Prometheus gets the differences."""
        now, before = self._checkpointer.stats, self._counted
        self._metrics.page_verify_failures.inc(now.verify_failures - before.verify_failures)
        self._metrics.swapped_pages.labels("out").inc(now.pages_written - before.pages_written)
        self._metrics.swapped_pages.labels("in").inc(now.pages_restored - before.pages_restored)
        before.verify_failures, before.pages_written, before.pages_restored = (
            now.verify_failures,
            now.pages_written,
            now.pages_restored,
        )
