"""The jobs that this incarnation owns: how they come into the engine, what their commits must prove, how they leave."""

from dataclasses import replace

import structlog

from engine.core import Admission, Engine, Failure, TokenOutput
from engine.errors import GrammarFailed, InvalidRequest, RequestTooLarge
from engine.sequence import FinishReason
from recovery.sequences import CannotGoOn, Held, LogDamaged, commit_of, finish_of, hold
from service.worker.state import Identity, LoopState, Observer, Taken, Wakeups
from service.worker.store_thread import StoreThread
from storage.records import Commit, Finish, JobError, JobStatus, OwnedJob, Renewed

log = structlog.get_logger("midsentence.engine")


class Holdings:
    """Belongs to the step loop. A job that is held is known to the engine, and the other way round."""

    def __init__(self, engine: Engine, store: StoreThread, observer: Observer, wakeups: Wakeups, state: LoopState) -> None:
        self._engine = engine
        self._store = store
        self._observer = observer
        self._wakeups = wakeups
        self._state = state
        self._held: dict[str, Held] = {}
        self._counters: dict[str, tuple[int, int, int]] = {}  # job -> cached tokens, replayed tokens, restored pages

    def __len__(self) -> int:
        return len(self._held)

    @property
    def job_ids(self) -> list[str]:
        return list(self._held)

    @property
    def owned(self) -> list[OwnedJob]:
        return [held.owned for held in self._held.values()]

    def take(self, taken: Taken, who: Identity) -> Commit | None:
        """A job is ours: verify its log and hand it to the engine. A commit, when all that is left to do is to write its end."""
        job_id = taken.record.job_id
        if job_id in self._held or taken.record.status.terminal:
            return None
        bound = log.bind(job_id=job_id, request_id=taken.record.request_id)
        try:
            held, request = hold(taken.owned, taken.record, taken.entries, who.arithmetic_fingerprint)
        except CannotGoOn as error:
            code, problem = error.code, str(error)
            bound.error(code, problem=problem)
            if isinstance(error, LogDamaged):
                self._observer.lost(taken.record.log_length)
            self._store.submit(lambda store: store.fail(job_id, code, problem))
            return None
        self._held[job_id] = held
        try:
            self._engine.add(request)
        except RequestTooLarge as error:
            bound.warning("job_too_large_here", problem=str(error))
            self.forget(job_id)
            self._store.submit(lambda store: store.release(who.info.engine_id, who.incarnation, [held.owned], affinity=False))
            return None
        except InvalidRequest:  # every token is there, but the end was not written
            self.forget(job_id)
            finish = finish_of(FinishReason.LENGTH, held.spec)
            return Commit(job_id, held.owned.fence, held.log_length, held.chain, finish=finish)
        except GrammarFailed as error:
            return self.fail(Failure(job_id, error))
        if not request.publishes:
            # Logged tokens never change and old pages still verify; only equality with the uninterrupted run is off.
            bound.warning("arithmetic_changed", hint="the job goes on, but not bit for bit as it began")
        bound.info("job_taken", tokens=held.log_length, recoveries=taken.record.recoveries, strikes=taken.owned.strikes)
        self._state.held = tuple(self._held)
        return None

    def admitted(self, admission: Admission) -> None:
        held = self._held[admission.sequence_id]
        resumed = held.resumed
        self._counters[held.job_id] = (
            0 if resumed else admission.restart.num_stored,
            admission.restart.replayed if resumed else 0,
            admission.restored_pages if resumed else 0,
        )
        if resumed:
            bound = log.bind(job_id=held.job_id, request_id=held.record.request_id)
            bound.info("job_resumed", pages_restored=admission.restored_pages, tokens_replayed=admission.restart.replayed)
        self._observer.admitted(held, admission.restored_pages, admission.restart)

    def commit(self, output: TokenOutput, who: Identity) -> Commit:
        """The commit of one new token. Counters ride with it, so that sending it twice cannot count twice."""
        commit = commit_of(self._held[output.sequence_id], output)
        counters = self._counters.pop(commit.job_id, None)
        if output.finish is not None:
            self.forget(commit.job_id)
        if counters is None:
            return commit
        cached, replayed, restored = counters
        return replace(
            commit,
            arithmetic_fingerprint=who.arithmetic_fingerprint,
            cached_tokens=cached,
            tokens_replayed=replayed,
            pages_restored=restored,
        )

    def fail(self, failure: Failure) -> Commit:
        """The end of a job that can have no further token, as it would have none from any other engine either."""
        held, problem, code = self._held[failure.sequence_id], str(failure.error), failure.error.code
        log.error(code, job_id=held.job_id, request_id=held.record.request_id, tokens=held.log_length, problem=problem)
        self.forget(held.job_id)
        finish = Finish(JobStatus.FAILED, error=JobError(code, problem))
        return Commit(held.job_id, held.owned.fence, held.log_length, held.chain, finish=finish)

    def reconcile(self, renewed: Renewed) -> None:
        """Held but not listed: drop. Listed but not held: a claim will bring it."""
        fences = {job.job_id: job.fence for job in renewed.owned}
        for job_id, held in list(self._held.items()):
            if fences.get(job_id) != held.owned.fence:
                self.drop(job_id, "not_listed")
        if fences.keys() - self._held.keys():
            self._wakeups.hint()

    def drop(self, job_id: str, reason: str) -> None:
        """The job is not ours any more (cancelled, taken over, gone): its uncommitted work is dropped, nobody saw it."""
        if self.forget(job_id):
            log.info("job_dropped", job_id=job_id, reason=reason)
            self._observer.dropped(job_id, reason)

    def forget(self, job_id: str) -> bool:
        """Let go of it here. False when it was not held."""
        self._counters.pop(job_id, None)
        known = self._held.pop(job_id, None) is not None
        self._engine.abort(job_id)
        self._state.held = tuple(self._held)
        self._wakeups.claim.set()  # there is room again
        return known
