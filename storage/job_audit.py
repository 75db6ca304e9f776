"""What must hold of one job: its record, its log, and every place where Redis lists it. Pure, over what was read."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from storage import chain, keys
from storage.codec import job_record, log_entry, pairs
from storage.findings import Check, Finding, Severity
from storage.records import JobRecord, JobStatus

_LOST = "put back a copy of the directory that has it; without one, `midsentence recover` ends the job"
_BUG = "nothing of ours leaves this behind: keep a copy of the directory and report it"
_QUEUE_STEP = 1 << 44  #: priority first, then order: the score that ``jobs.lua`` gives
_SCORES_EQUAL = 0.001  #: seconds; orders differ by 1
#: Fields of a record that say where its job stands.
STANDING = ("status", "tenant", "model", "engine", "order", "priority", "deadline_at", "served_by", "batch", "stored")


def damage(check: Check, where: str, what: str, fix: str = _BUG) -> Finding:
    return Finding(Severity.DAMAGE, check, where, what, fix)


@dataclass(slots=True)
class SeenJob:
    """A job's record and how far its log was read; without the prompt, which can be long."""

    record: JobRecord
    standing: Mapping[str, str]
    idempotency: str  #: digest of its key; ""
    log_entries: int  #: that the log has, whatever the record says
    chain: str  #: over the entries read
    read: int = 0
    problem: Finding | None = None  #: what ended the reading

    @property
    def job_id(self) -> str:
        return self.record.job_id

    @property
    def unread(self) -> int:
        """Entries to come, by the record."""
        return 0 if self.problem is not None else max(0, self.record.log_length - self.read)


def parse_job(job_id: str, fields: Mapping[str, str], log_entries: int) -> SeenJob | Finding:
    try:
        record = job_record(job_id, fields)
        standing, idempotency = {name: fields[name] for name in STANDING if name not in ("batch", "stored")}, fields["idempotency"]
    except (KeyError, ValueError) as error:
        return damage(Check.JOB, job_id, f"its record cannot be read: {explain(error)}", _LOST)
    standing |= {"batch": record.batch, "stored": "1" if record.stored else ""}  # fields that other jobs do not have
    start = chain.start(record.spec, record.prompt_token_ids, job_id)
    return SeenJob(replace(record, prompt_token_ids=()), standing, idempotency, log_entries, start)


def read_log(job: SeenJob, entries: Sequence[tuple[str, Sequence[str]]], count: int) -> None:
    """Take in the next ``count`` entries: what Redis answered when it was asked for them."""
    for entry_id, flat in entries:
        if entry_id != f"{job.read + 1}-0":
            break
        try:
            job.chain = chain.extend(job.chain, log_entry(pairs(flat)).token)
        except (KeyError, ValueError, OverflowError) as error:
            job.problem = _log_damage(job, f"entry {entry_id} of its log cannot be read: {explain(error)}")
            return
        job.read += 1
        count -= 1
    if count:
        held = f"the log holds {job.log_entries} entries, the record counts {job.record.log_length}"
        job.problem = _log_damage(job, f"entry {job.read + 1} of its log is missing; {held}")


def log_finding(job: SeenJob) -> Finding | None:
    """After the whole log was read."""
    if job.problem is not None:
        return job.problem
    if job.log_entries != job.record.log_length:
        return _log_damage(job, f"the log holds {job.log_entries} entries, the record counts {job.record.log_length}")
    if job.chain != job.record.chain:
        return _log_damage(job, "the chain hash of its log is not that of its record: a token, prompt or setting was changed")
    return None


def _log_damage(job: SeenJob, what: str) -> Finding:
    return damage(Check.LOG, job.job_id, what, _LOST)


def places(standing: Mapping[str, str]) -> dict[str, float | None]:
    """Every key that must list the job, with its score there; None where none is promised. No other key may list it.

    Raises ValueError for a status or number that is none.
    """
    order, status = float(standing["order"]), JobStatus(standing["status"])
    found: dict[str, float | None] = {
        keys.index(kind, tenant): order
        for kind in ("all", status, *(["stored"] if standing["stored"] else []))
        for tenant in (None, standing["tenant"])
    }
    if status is JobStatus.QUEUED:
        found[keys.queue(standing["model"])] = order - int(standing["priority"]) * _QUEUE_STEP
    if status is JobStatus.IN_PROGRESS:
        found[keys.owned(standing["engine"])] = None
    if status.terminal:
        found |= {} if standing["batch"] else {keys.EXPIRY: None}
    else:
        found |= {keys.DEADLINES: float(standing["deadline_at"])} if standing["deadline_at"] else {}
        found |= {keys.served(standing["served_by"]): None} if standing["served_by"] else {}
        found |= {keys.BATCH_JOBS + standing["batch"]: None} if standing["batch"] else {}
    return found


def place_findings(job: SeenJob, scores: Mapping[str, float | None]) -> Iterator[Finding]:
    """``scores``: in the keys that list the job; None in a set."""
    for key, score in places(job.standing).items():
        if key not in scores:
            yield damage(Check.JOB, job.job_id, f"is {job.record.status} and not listed in {short(key)}")
        elif score is not None and abs(score - (scores[key] or 0.0)) > _SCORES_EQUAL:
            yield damage(Check.JOB, job.job_id, f"has score {scores[key]} in {short(key)}, by its record {score}")


def member_finding(key: str, job_id: str, standing: Mapping[str, str | None]) -> Finding | None:
    """Whether ``key`` lists the job rightly. ``standing``: None in every field where there is no record."""
    if standing["status"] is None:
        return damage(Check.KEY, short(key), f"lists job {job_id}, which has no record", _LOST)
    try:
        if key in places({name: value or "" for name, value in standing.items()}):
            return None
    except ValueError:
        return None  # the record cannot be read: found there
    return damage(Check.JOB, job_id, f"is {standing['status']} and listed in {short(key)}")


def owner_findings(record: JobRecord, incarnation: str | None) -> Iterator[Finding]:
    """``incarnation``: the registered one of the record's engine; None when there is no such engine."""
    if record.status is JobStatus.IN_PROGRESS and (incarnation is None or record.incarnation != incarnation):
        owner = f"incarnation {record.incarnation} of engine {record.engine_id}"
        yield damage(Check.JOB, record.job_id, f"belongs to {owner}, which is not the registered one")
    if record.status is JobStatus.QUEUED and record.engine_id:
        yield damage(Check.JOB, record.job_id, f"is queued and belongs to engine {record.engine_id}")
    if record.log_length and not record.fence:
        yield damage(Check.JOB, record.job_id, "has tokens and was never given to an engine")


def idempotency_findings(job: SeenJob, named: str | None) -> Iterator[Finding]:
    """``named``: what the job's idempotency key holds. The key lives as long as the first job that it made."""
    record = job.record
    if record.group in ("", record.job_id) and record.job_id not in (named or "").split():
        what = "its idempotency key is gone: the same request, sent again, would make a second job"
        yield damage(Check.JOB, record.job_id, what)


def short(key: str) -> str:
    return key.removeprefix(keys.PREFIX)


def explain(error: Exception) -> str:
    return f"field {error} is missing" if isinstance(error, KeyError) else str(error)
