"""Every Prometheus name of Midsentence, with its meaning: vLLM's suffixes under our prefix, so that its dashboards port.

Each class takes a registry, so that two servers in one test process do not share counters. No label holds a job id, a request
id or text.
"""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

PREFIX = "midsentence"

_LATENCY = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
_INTER_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5, 10)
_WHOLE_JOB = (0.1, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800, 3600, 14400, 86400)


class ApiMetrics:
    """What one api process sees. ``jobs`` is of the whole store: take the maximum over apis, not the sum."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.jobs = Gauge("jobs", "Jobs in the store, by status.", ["status"], namespace=PREFIX, registry=registry)
        self.http_requests = Counter(
            "http_requests", "Requests answered.", ["method", "route", "code"], namespace=PREFIX, registry=registry
        )
        self.http_request_seconds = Histogram(
            "http_request_duration_seconds",
            "Time to the first byte of an answer.",
            ["method", "route"],
            buckets=_LATENCY,
            namespace=PREFIX,
            registry=registry,
        )
        self.open_streams = Gauge("open_streams", "Event streams open now.", namespace=PREFIX, registry=registry)
        self.streamed_tokens = Counter("streamed_tokens", "Tokens written to event streams.", namespace=PREFIX, registry=registry)
        self.stream_resumes = Counter(
            "stream_resumes", "Event streams opened at a position after the first token.", namespace=PREFIX, registry=registry
        )
        self.idempotent_replays = Counter(
            "idempotent_replays",
            "Submissions answered with the job that an earlier one made.",
            namespace=PREFIX,
            registry=registry,
        )
        self.store_errors = Counter(
            "store_errors", "Calls that the job store did not answer properly.", ["error"], namespace=PREFIX, registry=registry
        )
        self.engines_taken_over = Counter(
            "engines_taken_over", "Engines that this process judged to be dead.", namespace=PREFIX, registry=registry
        )
        self.batches = Gauge("batches", "Batches in the store, by status.", ["status"], namespace=PREFIX, registry=registry)
        self.batch_lines_fed = Counter(
            "batch_lines_fed", "Lines of batches that this process made jobs of.", namespace=PREFIX, registry=registry
        )
        self.jobs_purged = Counter(
            "jobs_purged", "Finished jobs deleted after the retention time.", namespace=PREFIX, registry=registry
        )


class EngineMetrics:
    """What one engine sees."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self.num_requests_running = self._gauge("num_requests_running", "Jobs whose tokens are being computed.")
        self.num_requests_waiting = self._gauge("num_requests_waiting", "Jobs claimed by this engine that wait for pages.")
        self.kv_cache_usage_perc = self._gauge(
            "kv_cache_usage_perc", "Device pages that jobs need now, 0 to 1; those that are only cached do not count."
        )
        self.host_pool_usage_perc = self._gauge("host_pool_usage_perc", "Host pages that hold something, 0 to 1.")
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of jobs that were started.")
        self.generation_tokens = self._counter("generation_tokens", "Tokens committed.")
        self.time_to_first_token = self._histogram("time_to_first_token_seconds", "From creation to the first token.", _LATENCY)
        self.inter_token_latency = self._histogram("inter_token_latency_seconds", "Between two tokens of a job.", _INTER_TOKEN)
        self.e2e_request_latency = self._histogram("e2e_request_latency_seconds", "From creation to the end.", _WHOLE_JOB)
        self.request_queue_time = self._histogram("request_queue_time_seconds", "From creation to the first claim.", _WHOLE_JOB)
        self.num_preemptions = self._counter(
            "num_preemptions",
            "Running jobs taken off the device for want of pages: rows kept (swap) or dropped (replay).",
            ("how",),
        )
        self.prefix_cache_queries = self._counter("prefix_cache_queries", "Prompt tokens that were looked up at a job's start.")
        self.prefix_cache_hits = self._counter("prefix_cache_hits", "Of these, tokens whose KV was found, not computed.")
        self.pages_found = self._counter(
            "pages_found", "Where a job's full pages were when it got its place: device, host, or nowhere (computed).", ("where",)
        )
        self.page_faults = self._counter(
            "page_faults", "Pages that a planned job had filled before and that were not on the device. Rate: over page_reads."
        )
        self.page_reads = self._counter("page_reads", "Pages that attention read, counted once for each step.")
        self.pages_copied_on_write = self._counter("pages_copied_on_write", "Shared pages copied before one of their jobs wrote.")
        self.evictions = self._counter("evictions", "Cached pages given up to make room.", ("pool", "policy"))
        self.swapped_pages = self._counter("swapped_pages", "Pages copied from the device (out) or to it (in).", ("direction",))
        self.swapped_bytes = self._counter("swapped_bytes", "Bytes of these pages.", ("direction",))
        self.swap_seconds = self._counter("swap_seconds", "Time that these copies took, beside the steps.", ("direction",))
        self.swap_stall_seconds = self._counter("swap_stall_seconds", "Time that nothing could be computed until a copy completed.")
        self.swap_hidden_ratio = self._gauge(
            "swap_hidden_ratio",
            "Share of the time of copies to the device that computing hid: 1 - stall / copy time, since the start.",
        )
        self.pages_unbacked = self._counter("pages_unbacked", "Full pages that no host page was free for: recomputed if lost.")
        self.step_seconds = self._histogram(
            "step_duration_seconds", "Computing one engine step; its commit overlaps with the next.", _INTER_TOKEN
        )
        self.attention_seconds = self._histogram(
            "attention_duration_seconds",
            "Attention of one step over all layers, on the CPU; part of the step's time.",
            _INTER_TOKEN,
        )
        self.commit_seconds = self._histogram("commit_duration_seconds", "One step's durable write.", _INTER_TOKEN)
        self.recoveries = self._counter("recoveries", "Jobs taken up again after a death of their owner.", ("outcome",))
        self.recovery_duration = self._histogram("recovery_duration_seconds", "From taking a job up to its next token.", _LATENCY)
        self.recovery_tokens_replayed = self._counter("recovery_tokens_replayed", "Committed tokens whose KV was recomputed.")
        self.recovery_pages_restored = self._counter("recovery_pages_restored", "Pages read back and verified.")
        self.tokens_lost = self._counter("tokens_lost", "Tokens of logs that did not verify. Stays 0.")
        self.checkpoint_lag_tokens = self._gauge("checkpoint_lag_tokens", "Committed tokens not yet in a published page.")
        self.page_verify_failures = self._counter(
            "page_verify_failures", "Pages refused because their bytes or checksum are wrong."
        )
        self.lease_lost = self._counter("lease_lost", "Times this engine was declared dead while it lived.")
        self.fenced_writes_rejected = self._counter(
            "fenced_writes_rejected", "Commits refused because another engine owns the job."
        )

    def _gauge(self, name: str, meaning: str) -> Gauge:
        return Gauge(name, meaning, namespace=PREFIX, registry=self._registry)

    def _counter(self, name: str, meaning: str, labels: tuple[str, ...] = ()) -> Counter:
        """prometheus_client puts ``_total`` behind the name."""
        return Counter(name, meaning, labels, namespace=PREFIX, registry=self._registry)

    def _histogram(self, name: str, meaning: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, meaning, buckets=buckets, namespace=PREFIX, registry=self._registry)
