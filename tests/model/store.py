"""The model of Redis, which can do without any one of the mechanisms that hold the protocol together."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from storage import chain
from storage.memory_store import MemoryJobStore
from storage.records import Commit, JobAnswer, JobRecord, JobStatus, OwnedJob, StepWrites

_NOW = 1_800_000_000.0


@dataclass(frozen=True)
class Message:
    worker: int
    incarnation: str
    commit: Commit


@dataclass(frozen=True)
class LateClaim:
    """A claim on its way; nobody waits for its answer any more."""

    worker: int
    incarnation: str
    held: tuple[str, ...]


class ModelStore(MemoryJobStore):
    """The store without one of its mechanisms."""

    def __init__(self, without: str = "") -> None:
        super().__init__(clock=lambda: _NOW)
        self.without = without

    def clone(self) -> "ModelStore":
        copy = ModelStore(self.without)
        copy._state = self._state.copy()
        copy._store, copy._bound = self._store, self._bound
        return copy

    def key(self) -> tuple[Any, ...]:
        """Equal for stores that answer everything alike, but for the counter of commits, which never decides anything here."""
        jobs = tuple(
            (job.record, tuple(job.entries), job.charged, job.lost, job.orphan_of, job.released_by)
            for job in self._state.jobs.values()
        )
        return jobs, tuple((e.incarnation, e.dead, e.failed, e.ended_well) for e in self._state.engines.values())

    def deliver(self, engine_id: str, message: Message) -> JobAnswer:
        """The commit of a message. Raises EngineDead."""
        commit, incarnation = message.commit, message.incarnation
        record = self.record(commit.job_id)
        if record.status is JobStatus.IN_PROGRESS:
            if self.without in ("fence", "incarnation"):
                incarnation = record.incarnation
            if self.without == "fence":
                commit = replace(commit, fence=record.fence)
            if self.without == "expected length":
                tokens = [entry.token for entry in commit.tokens]
                commit = replace(commit, expected=record.log_length, chain=chain.extend_all(record.chain, tokens))
            if self.without in ("fence", "incarnation"):
                engine_id = record.engine_id
        (answer,) = self.write_step(engine_id, incarnation, "", StepWrites(commits=(commit,))).commits
        if self.without == "strike reset":
            self._state.jobs[commit.job_id].change(strikes=record.strikes)
        return answer

    def claim(self, engine_id: str, incarnation: str, *, held: Sequence[str], free_pages: int, limit: int) -> tuple[OwnedJob, ...]:
        if self.without == "held list":
            held = tuple(self._state.jobs)
        if self.without == "incarnation of a claim":
            engine = self._state.engines[engine_id]
            self._state.engines[engine_id] = replace(engine, incarnation=incarnation, dead=False)
            given = super().claim(engine_id, incarnation, held=held, free_pages=free_pages, limit=limit)
            self._state.engines[engine_id] = engine
            return given
        return super().claim(engine_id, incarnation, held=held, free_pages=free_pages, limit=limit)

    def record(self, job_id: str) -> JobRecord:
        return self._state.jobs[job_id].record

    def log(self, job_id: str) -> tuple[int, ...]:
        return tuple(entry.token for entry in self._state.jobs[job_id].entries)
