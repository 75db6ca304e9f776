"""The longer verbs of ``MemoryJobStore``, each on a state whose lock the caller holds: the counterparts of single scripts."""

from collections.abc import Sequence

from storage import chain, keys
from storage.memory_state import Engine, Job, State
from storage.records import (
    Commit,
    EngineInfo,
    JobAnswer,
    JobRecord,
    JobStatus,
    NewJob,
    OwnedJob,
    RegisterOutcome,
    SubmitOutcome,
    Submitted,
)
from storage.rules import IDEMPOTENCY_HOLD, READ_HOLD


def submit_group(state: State, jobs: Sequence[NewJob], queue_limit: int, tenant_limit: int | None) -> Submitted:
    first, ids = jobs[0], tuple(job.job_id for job in jobs)
    if any(job_id in state.jobs for job_id in ids):
        return Submitted(SubmitOutcome.EXISTS, ids)
    digest = "" if first.idempotency_key is None else keys.idempotency_digest(first.tenant, first.idempotency_key)
    earlier = state.keys.get(digest)
    if earlier is not None:
        same = state.jobs[earlier[0]].request_hash == first.request_hash
        return Submitted(SubmitOutcome.EXISTS if same else SubmitOutcome.CONFLICT, earlier)
    refused = no_room(state, jobs, queue_limit, tenant_limit)
    if refused is not None:
        return Submitted(refused, ids)
    create_group(state, jobs, digest)
    if digest:
        state.keys[digest] = ids
    state.commit += 1
    return Submitted(SubmitOutcome.CREATED, ids)


def no_room(state: State, jobs: Sequence[NewJob], queue_limit: int, tenant_limit: int | None) -> SubmitOutcome | None:
    first = jobs[0]
    if len(state.queue(first.model_fingerprint)) + len(jobs) > queue_limit:
        return SubmitOutcome.FULL
    queued = [job for job in state.jobs.values() if job.record.status is JobStatus.QUEUED and job.record.tenant == first.tenant]
    if tenant_limit is not None and len(queued) + len(jobs) > tenant_limit:
        return SubmitOutcome.TENANT_FULL
    return None


def create_group(state: State, jobs: Sequence[NewJob], digest: str = "") -> None:
    for job in jobs:
        state.order += 1
        state.jobs[job.job_id] = Job(_new_record(job, state), job.request_hash, digest)
        state.hints.publish(job.job_id)
    if jobs[0].served_by:
        state.api_beat(jobs[0].served_by)


def _new_record(job: NewJob, state: State) -> JobRecord:
    return JobRecord(
        job_id=job.job_id,
        spec=job.spec,
        prompt_token_ids=job.prompt_token_ids,
        model_fingerprint=job.model_fingerprint,
        max_tokens=job.max_tokens,
        status=JobStatus.QUEUED,
        order=state.order,
        priority=job.priority,
        tenant=job.tenant,
        chain=chain.start(job.spec, job.prompt_token_ids, job.job_id),
        created_at=state.now,
        deadline_at=None if job.deadline_seconds is None else state.now + job.deadline_seconds,
        request_id=job.request_id,
        traceparent=job.traceparent,
        group=job.group,
        served_by=job.served_by,
        batch=job.batch,
        choices=job.choices,
        stored=job.stored,
    )


def refusal(old: Engine | None, owned: Sequence[Job], info: EngineInfo, seen: tuple[str, int] | None) -> RegisterOutcome | None:
    if old is not None and not old.dead and old.info.boot_id != info.boot_id:
        if seen is None:
            return RegisterOutcome.OTHER_HOST
        if seen != (old.incarnation, old.beat):
            return RegisterOutcome.IN_USE
    if any(job.record.model_fingerprint != info.model_fingerprint for job in owned):
        return RegisterOutcome.OTHER_MODEL
    return None


def commit_job(state: State, incarnation: str, commit: Commit) -> JobAnswer:
    job = state.jobs.get(commit.job_id)
    if job is None:
        return JobAnswer.GONE
    record = job.record
    n = len(commit.tokens)
    mine = (record.fence, record.incarnation) == (commit.fence, incarnation)
    reached = record.log_length == commit.expected + n and record.chain == commit.chain
    if record.status.terminal:
        made_it_so = mine and reached and commit.finish is not None and commit.finish.status is record.status
        return JobAnswer.ALREADY if made_it_so else JobAnswer.TERMINAL
    if not mine or record.status is not JobStatus.IN_PROGRESS:
        return JobAnswer.FENCED
    counters = (commit.cached_tokens, commit.tokens_replayed, commit.pages_restored)
    counted = (commit.fence, commit.expected, *counters, commit.arithmetic_fingerprint)
    if commit.finish is None and reached and (n > 0 or job.counted == counted):
        return JobAnswer.ALREADY
    if record.log_length != commit.expected or (n == 0 and record.chain != commit.chain):
        return JobAnswer.GAP

    job.entries.extend(commit.tokens)
    if n > 0:
        job.charged = 0
        job.change(strikes=0)
    else:
        job.counted = counted
    job.change(
        log_length=commit.expected + n,
        chain=commit.chain,
        arithmetic_fingerprint=record.arithmetic_fingerprint or commit.arithmetic_fingerprint,
        cached_tokens=record.cached_tokens + commit.cached_tokens,
        tokens_replayed=record.tokens_replayed + commit.tokens_replayed,
        pages_restored=record.pages_restored + commit.pages_restored,
    )
    if commit.finish is not None:
        state.end(job, commit.finish.status, commit.finish.finish_reason, commit.finish.error)
    else:
        state.hints.publish(record.job_id)
    return JobAnswer.OK


def release_job(state: State, engine_id: str, incarnation: str, owned: OwnedJob, affinity: bool) -> JobAnswer:
    job = state.jobs.get(owned.job_id)
    if job is None:
        return JobAnswer.GONE
    record = job.record
    if record.status.terminal:
        return JobAnswer.TERMINAL
    if record.status is JobStatus.QUEUED and record.fence == owned.fence and job.released_by == incarnation:
        return JobAnswer.ALREADY
    if record.status is JobStatus.QUEUED or (record.fence, record.incarnation) != (owned.fence, incarnation):
        return JobAnswer.FENCED
    state.release(job, engine_id, incarnation, affinity)
    return JobAnswer.OK


def purge_job(state: State, job: Job, retention: float) -> bool:
    hold = 0.0 if job.read_at is None else job.read_at + READ_HOLD
    if job.digest:
        hold = max(hold, job.record.created_at + IDEMPOTENCY_HOLD)
    if hold > state.now:
        job.expires = hold - retention
        return False
    remove_job(state, job)
    state.commit += 1
    return True


def remove_job(state: State, job: Job) -> None:
    del state.jobs[job.record.job_id]
    if state.keys.get(job.digest, ())[:1] == (job.record.job_id,):
        del state.keys[job.digest]
    state.purges += 1
    state.hints.publish(job.record.job_id)


def rewrite_file(state: State, interval: float) -> bool:
    """There is no file; who asks, and how often, is what the fake shares with the real one."""
    waits = state.rewrite_at is not None and abs(state.now - state.rewrite_at) < interval
    if state.purges == state.purges_rewritten or waits:
        return False
    state.purges_rewritten, state.rewrite_at = state.purges, state.now
    return True
