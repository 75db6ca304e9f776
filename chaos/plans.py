"""What ``midsentence recover --dry-run --json`` says, held against what ``serve`` then does to the very same jobs."""

from dataclasses import dataclass
from typing import Any

from chaos.dump import dump_jobs, reading
from chaos.history import JobSeen
from chaos.processes import Timeout, wait_until
from chaos.stage import Stage
from chaos.traffic import Traffic
from storage.records import JobStatus

_CARRIED_OUT_TIMEOUT = 120.0


@dataclass(frozen=True, slots=True)
class PlannedJob:
    job_id: str
    action: str
    committed_tokens: int
    pages_restored: int
    tokens_replayed: int


def planned_recovery(stage: Stage) -> list[PlannedJob]:
    """Ask while nobody runs. Twice: a dry run must change nothing, so the second answers as the first."""
    first, second = (_planned(stage.cluster.recover("--dry-run")) for _ in range(2))
    if first != second:
        stage.violate("I11", "recover --dry-run changed what recover --dry-run says", evidence=f"{first} {second}")
    if left := stage.cluster.family.living():
        stage.violate("I12", "recover left processes behind", evidence=str(left))
    return second


def _planned(report: dict[str, Any]) -> list[PlannedJob]:
    return [
        PlannedJob(
            str(job["job_id"]),
            str(job["action"]),
            int(job["committed_tokens"]),
            int(job["pages_restored"]),
            int(job["tokens_replayed"]),
        )
        for job in report["jobs"]
    ]


def settled(stage: Stage, traffic: Traffic) -> dict[str, JobSeen]:
    """The recovery counters of every live job, at a moment when no recovery is under way. Jobs made later have none yet."""
    return dump_jobs(stage.cluster.url, traffic.live_jobs())


def check_plan(stage: Stage, plan: list[PlannedJob], before: dict[str, JobSeen]) -> None:
    """Wait until each planned job was taken up again, then compare what was restored and replayed with what was said.

    A job may do better than was said: another one of the same prompt brought pages that were damaged or missing. Never worse.
    """
    fresh = JobSeen("queued")
    seen: dict[str, JobSeen] = {}

    def carried_out() -> bool:
        seen.update(dump_jobs(stage.cluster.url, [job.job_id for job in plan]))
        return all(job.job_id in seen and _was_taken_up(job, seen[job.job_id]) for job in plan)

    try:
        wait_until(carried_out, _CARRIED_OUT_TIMEOUT, "the recovery of all planned jobs", pause=0.2)
    except Timeout as late_ones:
        late = [job.job_id for job in plan if not _was_taken_up(job, seen.get(job.job_id, fresh))]
        stage.violate("I8", str(late_ones), evidence=" ".join(late))
    for job in plan:
        earlier, later = before.get(job.job_id, fresh), seen.get(job.job_id, fresh)
        if later.status in (JobStatus.FAILED, JobStatus.CANCELLED):
            continue  # I8 and I3 judge those
        done = (later.pages_restored - earlier.pages_restored, later.tokens_replayed - earlier.tokens_replayed)
        said = (job.pages_restored, job.tokens_replayed)
        if not as_said_or_better(said, done):
            problem = f"{job.action} was to restore {said[0]} pages and replay {said[1]} tokens, and did {done[0]} and {done[1]}"
            stage.violate("PLAN", problem, job_id=job.job_id, evidence=f"{job.committed_tokens} tokens committed")
    actions = sorted({job.action for job in plan})
    stage.notes.append(
        f"plan of {len(plan)} jobs ({', '.join(actions)}): {sum(job.pages_restored for job in plan)} pages, "
        f"{sum(job.tokens_replayed for job in plan)} tokens"
    )


def as_said_or_better(said: tuple[int, int], done: tuple[int, int]) -> bool:
    """(pages restored, tokens replayed): equal, or more pages and no more tokens."""
    return done == said or (done[0] > said[0] and done[1] <= said[1])


def _was_taken_up(job: PlannedJob, later: JobSeen) -> bool:
    """Its numbers are in the record: they ride with the first token after the recovery."""
    return JobStatus(later.status).terminal or len(later.token_ids) > job.committed_tokens


def sealed_pages(stage: Stage) -> set[int]:
    """Host pages that the engine's pool table names."""
    with reading(stage.cluster.redis_url) as store:
        return {page for engine in store.engines() for page in store.pool_table(engine.info.pool_id)}
