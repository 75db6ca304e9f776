"""A job whose prompt crashes whatever computes it."""

from dataclasses import dataclass

from chaos.client import Client
from chaos.cluster import Cluster
from chaos.dump import dump_jobs
from chaos.faults.base import Proof
from chaos.place import fired_failpoints
from chaos.processes import wait_until
from chaos.workload import POISON_TOKEN, Answer, Case
from storage.records import JobStatus

CASE = Case("poison", {"prompt": [POISON_TOKEN, 7, 8, 9], "max_tokens": 20, "temperature": 0, "ignore_eos": True})
ANSWER = Answer("failed", (), "", "")
_TIMEOUT = 120.0
_CRASHES = 3


@dataclass(frozen=True, slots=True)
class Poison:
    """Submitted once; it must end as failed, at its third crash and no later. ``jobs`` is told its id."""

    client: Client
    jobs: dict[str, str]
    name: str = "poison job"

    def apply(self, cluster: Cluster) -> Proof:
        before = len(fired_failpoints(cluster.failpoint_log))
        job_id = self.client.submit(CASE, _TIMEOUT)
        if job_id is None:
            return Proof(False, "it was not accepted")
        self.jobs[job_id] = CASE.name

        def status() -> JobStatus:
            return JobStatus(dump_jobs(cluster.url, [job_id])[job_id].status)

        def crashes() -> int:
            fired = fired_failpoints(cluster.failpoint_log)[before:]
            return sum(line.startswith(f"prompt.{POISON_TOKEN} ") for line in fired)

        wait_until(lambda: crashes() > _CRASHES or status().terminal, _TIMEOUT, f"the end of {job_id}", pause=0.2)
        return Proof(crashes() == _CRASHES and status().terminal, f"{status()} after {crashes()} crashes")
