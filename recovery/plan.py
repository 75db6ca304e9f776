"""Recovery, decided before it is done: ``observe -> plan -> execute``. Pure; ``--dry-run`` prints exactly its answer."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from engine.identity import page_identities, root_identity
from engine.sequence import restart
from recovery.sequences import CannotGoOn, verify_log, verify_spec
from storage.records import JobRecord, JobStatus, LogEntry, PageEntry


class Action(StrEnum):
    START = "start"  #: never ran: begins at its prompt
    RESUME = "resume"  #: leading pages are restored, the rest of its tokens is replayed
    REPLAY = "replay"  #: no page of it is there: all its tokens are replayed
    WAIT = "wait"  #: needs a model that this engine does not serve; never failed for it
    ELSEWHERE = "elsewhere"  #: a living engine runs it
    FAIL = "fail"  #: a log that does not verify, or a spec of a newer version


@dataclass(frozen=True, slots=True)
class ObservedJob:
    record: JobRecord
    entries: tuple[LogEntry, ...]
    owner_alive: bool = False


@dataclass(frozen=True, slots=True)
class Observation:
    """What was read, at one moment. ``page_ok`` reads a host page and says whether its bytes have the published checksum."""

    engine_id: str
    model_fingerprint: str
    arithmetic_fingerprint: str
    page_size: int
    prefill_chunk: int
    jobs: tuple[ObservedJob, ...]
    table: Mapping[int, PageEntry]
    page_ok: Callable[[int, PageEntry], bool]


@dataclass(frozen=True, slots=True)
class JobPlan:
    job_id: str
    action: Action
    committed_tokens: int
    pages_restored: int = 0
    tokens_replayed: int = 0
    reason: str = ""
    code: str = ""  #: of the failure, where the action is FAIL
    fence: int = 0  #: what was observed; execution compares


@dataclass(frozen=True, slots=True)
class Plan:
    jobs: tuple[JobPlan, ...]
    bad_pages: tuple[int, ...]  #: host pages whose bytes do not have their checksum, among those that a job would use


def plan(seen: Observation) -> Plan:
    """What an engine that starts now with this data directory will do, job by job, in the order in which it will do it."""
    by_identity = {entry.identity: (page, entry) for page, entry in seen.table.items()}
    checked: dict[int, bool] = {}

    def usable(identity: str) -> bool:
        if identity not in by_identity:
            return False
        page, entry = by_identity[identity]
        if page not in checked:
            checked[page] = seen.page_ok(page, entry)
        return checked[page]

    ordered = sorted(seen.jobs, key=lambda job: (-job.record.priority, job.record.order))
    jobs = tuple(_plan_job(job, seen, usable) for job in ordered if not job.record.status.terminal)
    return Plan(jobs, tuple(sorted(page for page, ok in checked.items() if not ok)))


def _plan_job(job: ObservedJob, seen: Observation, usable: Callable[[str], bool]) -> JobPlan:
    record = job.record
    committed, fence = record.log_length, record.fence
    if record.model_fingerprint != seen.model_fingerprint:
        return JobPlan(record.job_id, Action.WAIT, committed, reason=f"waiting for model {record.model_fingerprint}", fence=fence)
    if record.status is JobStatus.IN_PROGRESS and record.engine_id != seen.engine_id:
        state = "living" if job.owner_alive else "silent"
        reason = f"with the {state} engine {record.engine_id}"
        return JobPlan(record.job_id, Action.ELSEWHERE, committed, reason=reason, fence=fence)
    tokens = [entry.token for entry in job.entries]
    try:
        verify_spec(record)
        verify_log(record, tokens)
    except CannotGoOn as error:
        return JobPlan(record.job_id, Action.FAIL, committed, reason=str(error), code=error.code, fence=fence)
    restored = _leading_pages(record, tokens, seen, usable)
    begin = restart(len(record.prompt_token_ids), len(tokens), restored, page_size=seen.page_size, prefill_chunk=seen.prefill_chunk)
    if not record.fence:
        return JobPlan(record.job_id, Action.START, committed, fence=fence)
    action = Action.RESUME if restored else Action.REPLAY
    return JobPlan(record.job_id, action, committed, restored, begin.replayed, fence=fence)


def _leading_pages(record: JobRecord, generated: Sequence[int], seen: Observation, usable: Callable[[str], bool]) -> int:
    arithmetic = record.arithmetic_fingerprint or seen.arithmetic_fingerprint
    root = root_identity(record.model_fingerprint, arithmetic, record.tenant)
    identities = page_identities(
        root,
        [*record.prompt_token_ids, *generated],
        len(record.prompt_token_ids),
        page_size=seen.page_size,
        prefill_chunk=seen.prefill_chunk,
    )
    for count, identity in enumerate(identities):
        if not usable(identity):
            return count
    return len(identities)
