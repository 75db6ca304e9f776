"""The state of the service at the end of a run, taken from outside: the api's answers, Redis' own contents, metrics, files."""

import contextlib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import redis

from chaos.client import job_seen
from chaos.history import JobSeen
from storage import keys
from storage.findings import Check, Finding, Severity
from storage.redis_store import RedisJobStore

_METRIC = re.compile(r"^(midsentence_\w+)(?:\{([^}]*)\})? (\S+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class LogRow:
    entry_id: str  #: as Redis has it
    token: int
    text: str


@dataclass(frozen=True, slots=True)
class StoredJob:
    """A job as Redis has it, with its whole log."""

    job_id: str
    status: str
    length: int
    chain: str
    spec: str
    prompt_token_ids: tuple[int, ...]
    recoveries: int
    rows: tuple[LogRow, ...]

    @property
    def tokens(self) -> tuple[int, ...]:
        return tuple(row.token for row in self.rows)


@dataclass(frozen=True, slots=True)
class EngineGauges:
    """Of one engine, at one moment."""

    kv_cache_usage: float
    running: float
    waiting: float


@dataclass(frozen=True, slots=True)
class Dump:
    jobs: dict[str, JobSeen]  #: ``GET /v1/jobs/{id}``
    stored: dict[str, StoredJob]
    idle: dict[str, tuple[EngineGauges, EngineGauges]]  #: engine -> (at its start, when idle at the end)
    pool_files: dict[str, tuple[str, ...]]  #: engine -> names of files that look like a pool
    counters: dict[str, float]  #: of the living engines, added up
    verified: dict[str, tuple[Finding, ...]]  #: what ``midsentence verify`` found, beside the service and after its end


class Metrics:
    """One scrape."""

    def __init__(self, text: str) -> None:
        self._values: dict[str, list[tuple[str, float]]] = {}
        for name, labels, value in _METRIC.findall(text):
            self._values.setdefault(name, []).append((labels, float(value)))

    @classmethod
    def of(cls, url: str) -> "Metrics":
        """Raises httpx.HTTPError."""
        answer = httpx.get(f"{url}/metrics", timeout=5.0, trust_env=False)
        answer.raise_for_status()
        return cls(answer.text)

    def __getitem__(self, name: str) -> float:
        """The sum over all labels. KeyError for a name that is not exposed: a misspelt metric must not read as 0."""
        return sum(value for _, value in self._values[f"midsentence_{name}"])

    def gauges(self) -> EngineGauges:
        return EngineGauges(self["kv_cache_usage_perc"], self["num_requests_running"], self["num_requests_waiting"])


COUNTERS = (
    "generation_tokens_total",
    "page_verify_failures_total",
    "tokens_lost_total",
    "lease_lost_total",
    "fenced_writes_rejected_total",
    "recovery_tokens_replayed_total",
    "recovery_pages_restored_total",
    "num_preemptions_total",
)


def dump_jobs(url: str, job_ids: Iterable[str]) -> dict[str, JobSeen]:
    with httpx.Client(base_url=url, timeout=15.0, trust_env=False) as client:
        found = {}
        for job_id in job_ids:
            answer = client.get(f"/v1/jobs/{job_id}")
            if answer.status_code == 200:
                found[job_id] = job_seen(answer.json())
        return found


@contextlib.contextmanager
def reading(redis_url: str) -> Iterator[RedisJobStore]:
    """The store, for looking only. Raises RuntimeError where there is none."""
    store = RedisJobStore(redis_url, client_name="chaos")
    try:
        identity = store.identity()
        if identity is None:
            raise RuntimeError(f"{redis_url} holds no store")
        store.bind(identity)
        yield store
    finally:
        store.close()


def dump_store(redis_url: str) -> dict[str, StoredJob]:
    """Every job in the store, whoever made it. The log is read past the product's own reader: entry ids as Redis has them."""
    found: dict[str, StoredJob] = {}
    plain = redis.Redis.from_url(redis_url, decode_responses=True)
    with contextlib.closing(plain), reading(redis_url) as store:
        cursor: str | None = None
        while True:
            page = store.jobs(tenant=None, limit=100, cursor=cursor)
            for record in page.jobs:
                entries: Any = plain.xrange(keys.log(record.job_id))
                found[record.job_id] = StoredJob(
                    job_id=record.job_id,
                    status=record.status.value,
                    length=record.log_length,
                    chain=record.chain,
                    spec=record.spec,
                    prompt_token_ids=record.prompt_token_ids,
                    recoveries=record.recoveries,
                    rows=tuple(LogRow(str(entry_id), int(fields["t"]), str(fields["x"])) for entry_id, fields in entries),
                )
            cursor = page.next_cursor
            if cursor is None:
                return found


def pool_files(data_dir: Path) -> tuple[str, ...]:
    """Everything in a data directory that looks like a pool, finished or not."""
    return tuple(sorted(path.name for path in data_dir.iterdir() if "pool" in path.name or "safetensors" in path.name))


def verify_findings(report: dict[str, Any]) -> tuple[Finding, ...]:
    """Of ``midsentence verify --json``."""
    rows = (dict(row) for row in report["findings"])
    return tuple(Finding(severity=Severity(row.pop("severity")), check=Check(row.pop("check")), **row) for row in rows)
