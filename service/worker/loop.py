"""The engine's life with the store: claim, step, commit, again. One thread; everything else reports to it.

Run-ahead is one step: while the answers of step k are on their way, step k+1 computes; step k+2 waits for them.
"""

import gc
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace

import structlog

from engine.core import Engine
from recovery.checkpointer import Checkpointer
from service.worker.holdings import Holdings
from service.worker.state import Identity, LoopState, Observer, Taken, Wakeups, new_incarnation, take_in
from service.worker.store_thread import StoreThread
from storage.errors import EngineDead, WrongStore
from storage.failpoints import armed, hit
from storage.job_store import JobStore
from storage.records import Commit, JobAnswer, OwnedJob, Renewed, StepAnswers, StepWrites

log = structlog.get_logger("midsentence.engine")

POISON = "prompt."  #: + a prompt's first token: the failpoint of every step that computed such a job
_TAKING = 0.1  #: seconds of a turn for jobs that were claimed: while more are taken in, pages of the first come in
_IDLE_WAIT = 0.25  #: seconds; every event that matters wakes the loop earlier
_REFUSED_PATIENCE = 60.0  #: seconds that an engine waits with its memory for the right store to come back


@dataclass(slots=True)
class _Pending:
    writes: StepWrites
    future: "Future[StepAnswers]"
    sent_at: float  #: monotonic


class EngineLoop:
    """Owns the engine, the checkpointer and the jobs held."""

    def __init__(
        self,
        engine: Engine,
        checkpointer: Checkpointer,
        store: StoreThread,
        identity: Identity,
        observer: Observer,
        wakeups: Wakeups,
        *,
        register: Callable[[str], "Future[tuple[OwnedJob, ...]]"],
        on_mark: Callable[[int], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._checkpointer = checkpointer
        self._store = store
        self._identity = identity
        self._observer = observer
        self._wakeups = wakeups
        self._register = register
        self._on_mark = on_mark
        self._clock = clock
        self.state = LoopState()
        self._jobs = Holdings(engine, store, observer, wakeups, self.state)
        self._pending: list[_Pending] = []
        self._registering: Future[tuple[OwnedJob, ...]] | None = None
        self._claiming: Future[list[Taken]] | None = None
        self._claimed: deque[Taken] = deque()  #: ours, and not yet taken in
        self._next_claim = 0.0
        self._renewals: list[Renewed] = []
        self._dead = ""  #: the incarnation that was declared dead last
        self._checked = False  #: the engine's books, since its last step
        self._poisoned = armed(POISON)

    # --- called by other threads --------------------------------------------------------------------------------------

    @property
    def identity(self) -> Identity:
        return self._identity

    def drain(self) -> None:
        """Stop claiming; ``run`` returns after the step in progress."""
        self.state.draining = True
        self._wakeups.wake()

    def heartbeat(self, store: JobStore, step_timeout: float) -> None:
        """Renew, on the store thread. A loop that hangs in a step must not look alive."""
        who = self._identity  # before the look at ``registered``: the loop may start over at any moment
        started = self.state.step_started
        if not self.state.registered or (started is not None and self._clock() - started > step_timeout):
            return
        try:
            self._renewals.append(store.renew(who.info.engine_id, who.incarnation))
            self.state.refused = None
        except EngineDead:
            self._dead = who.incarnation
        except WrongStore as error:
            self._refuse(error)

    # --- the loop -----------------------------------------------------------------------------------------------------

    def run(self, owned: tuple[OwnedJob, ...]) -> None:
        """Work until drained, beginning with what registration gave us. Raises WrongStore when it stayed wrong for a minute."""
        self.begin(owned)
        while not self.state.draining:
            self._wakeups.event.clear()
            if wait := self.turn():
                self._wakeups.event.wait(wait)

    def begin(self, owned: tuple[OwnedJob, ...]) -> None:
        """We are registered, and these jobs are ours."""
        self.state.registered = True
        self._claiming = self._store.submit(lambda store: take_in(store, owned))

    def turn(self) -> float:
        """Apply what was answered, then compute one step if there is one to compute. Never waits.

        Returns after how many seconds to come again, unless a wake-up comes first. Raises WrongStore when it stayed wrong for a
        minute.
        """
        self._wakeups.take_looks()
        if not self._is_registered():
            return _IDLE_WAIT
        self._apply_renewals()
        self._apply_answers()
        if self._is_dead:
            self._start_over()
            return 0.0
        self._claim()
        if self.state.refused is not None:
            return self._stand_by()
        if len(self._pending) > 1:
            return _IDLE_WAIT  # run-ahead is one step
        if self._engine.has_work:
            self._step()
            return 0.0
        self._idle()
        return 0.0 if self._claimed else _IDLE_WAIT

    def settle(self, timeout: float) -> bool:
        """Drain: copies in flight, then every answer. False when the store did not answer in time."""
        deadline = self._clock() + timeout
        while self._clock() < deadline:
            self._wakeups.event.clear()
            if self.settled():
                return True
            self._wakeups.event.wait(0.01)
        return False

    def settled(self) -> bool:
        """Apply what came back, and send what is ready. Whether nothing is on its way any more."""
        self._engine.collect()
        self._apply_answers()
        claimed = self._take_claimed()  # an answer that nobody takes in would be waited for, and its jobs never released
        if self._checkpointer.has_writes and not self._pending:
            self._send(())
        return claimed and not (self._pending or self._engine.residency.in_flight or self._checkpointer.has_writes)

    def held_jobs(self) -> list[OwnedJob]:
        return self._jobs.owned

    def _step(self) -> None:
        self.state.step_started = self._clock()
        self._checked = False
        result = self._engine.step()
        if self._poisoned:
            for sequence in self._engine.scheduler.running:
                hit(f"{POISON}{sequence.tokens[0]}")
        hit("worker.after_step")
        seconds = self._clock() - self.state.step_started
        self.state.step_started = None
        for admission in result.admissions:
            self._jobs.admitted(admission)
        commits = tuple(self._jobs.commit(output, self._identity) for output in result.outputs)
        commits += tuple(map(self._jobs.fail, result.failures))
        hit("worker.before_commit")
        self._send(commits)
        self._observer.stepped(result, seconds)

    def _send(self, commits: tuple[Commit, ...]) -> None:
        publish, drop = self._checkpointer.take_writes()
        if not (commits or publish or drop):
            return
        writes = StepWrites(commits, publish, drop)
        self._pending.append(_Pending(writes, self._submit(writes), self._clock()))

    def _submit(self, writes: StepWrites) -> "Future[StepAnswers]":
        who = self._identity
        return self._store.submit(lambda store: store.write_step(who.info.engine_id, who.incarnation, who.info.pool_id, writes))

    def _apply_answers(self) -> None:
        """Apply answered steps, oldest first."""
        while self._pending and self._pending[0].future.done():
            pending = self._pending[0]
            try:
                answers = pending.future.result()
            except EngineDead:
                self._dead = self._identity.incarnation
                return
            except WrongStore as error:
                # Nothing was written. The step is kept, and sent again should the store turn out to be ours after all.
                self._refuse(error)
                pending.future = self._submit(pending.writes)
                return
            del self._pending[0]
            hit("worker.after_commit")
            self._on_mark(answers.commit)
            self._checkpointer.written(pending.writes.publish, pending.writes.drop)
            for commit, answer in zip(pending.writes.commits, answers.commits, strict=True):
                self._apply_answer(commit, answer)
            self._observer.committed(answers, pending.writes.commits, self._clock() - pending.sent_at)

    def _apply_answer(self, commit: Commit, answer: JobAnswer) -> None:
        if answer.accepted:
            if commit.tokens:
                self._engine.clear_suspicion(commit.job_id)
            return
        if answer is JobAnswer.GAP:
            # The store is the right one (checked on every call), so this is our bug: count it, reload the job from its log.
            log.error("commit_gap", job_id=commit.job_id, expected=commit.expected)
        self._jobs.drop(commit.job_id, answer.value)

    def _claim(self) -> None:
        """Take in what was claimed; claim more when there is room and reason to."""
        if not self._take_claimed():
            return
        room = self._engine.scheduler.budget.max_running - len(self._jobs)
        now = self._clock()
        if self._is_dead or self.state.refused or self._store.away_since or room <= 0:
            return
        if not self._wakeups.claim.is_set() and now < self._next_claim:
            return
        self._wakeups.claim.clear()
        self._next_claim = now + 1.0
        held, free_pages, who = self._jobs.job_ids, self._free_pages(), self._identity
        if free_pages <= 0:
            return
        self._claiming = self._store.submit(
            lambda store: take_in(
                store,
                store.claim(who.info.engine_id, who.incarnation, held=held, free_pages=free_pages, limit=room),
            )
        )

    def _take_claimed(self) -> bool:
        """Take in some of what a claim was answered with. False while its answer is on the way, or more is left."""
        if self._claiming is not None:
            if not self._claiming.done():
                return False
            claiming, self._claiming = self._claiming, None
            self._renewals.clear()  # one that is older than this claim does not list its jobs; the next comes in a second
            hit("worker.after_claim")
            try:
                self._claimed.extend(claiming.result())
            except EngineDead:
                self._dead = self._identity.incarnation
            except WrongStore as error:
                self._refuse(error)
        until = self._clock() + _TAKING
        while self._claimed:
            end = self._jobs.take(self._claimed.popleft(), self._identity)
            if end is not None:
                self._send((end,))
            if self._clock() >= until:
                break
        if self._claimed:
            return False
        if self.state.registered and not self.state.scanned:
            self.state.scanned = True
            log.info("ready", jobs=len(self._jobs))
        return True

    def _free_pages(self) -> int:
        cache = self._engine.cache
        waiting = sum(cache.pages_for(len(s.tokens)) + 1 for s in self._engine.scheduler.waiting)
        return self._engine.residency.available - waiting

    def _apply_renewals(self) -> None:
        while self._renewals:
            renewed = self._renewals.pop(0)
            self._on_mark(renewed.commit)
            self._jobs.reconcile(renewed)

    @property
    def _is_dead(self) -> bool:
        """A beat of the last life may be answered only now: that says nothing of this one."""
        return self._dead == self._identity.incarnation

    def _start_over(self) -> None:
        """This incarnation was declared dead: drop all and register anew."""
        log.warning("declared_dead", incarnation=self._identity.incarnation, jobs=len(self._jobs))
        self._observer.declared_dead()
        for job_id in self._jobs.job_ids:
            self._jobs.drop(job_id, "declared_dead")
        for pending in self._pending:
            self._checkpointer.not_written(pending.writes.publish, pending.writes.drop)
        self._pending.clear()
        self._renewals.clear()
        self._claiming = None
        self._claimed.clear()
        self.state.registered = False
        incarnation = new_incarnation()
        self._identity = replace(self._identity, incarnation=incarnation)
        self._registering = self._register(incarnation)

    def _is_registered(self) -> bool:
        """False while the answer to a new registration is on the way; with it the loop goes on from the log."""
        if self._registering is not None:
            if not self._registering.done():
                return False
            registering, self._registering = self._registering, None
            self.begin(registering.result())
        return True

    def _refuse(self, error: WrongStore) -> None:
        if self.state.refused is None:
            log.error("store_refused", problem=error.message, hint=error.hint)
            self.state.refused_since = self._clock()
        self.state.refused = error

    def _stand_by(self) -> float:
        """Not our store: keep everything in memory, be not ready, give up after a minute. A beat that is accepted ends it."""
        refused = self.state.refused
        if refused is not None and self._clock() - self.state.refused_since > _REFUSED_PATIENCE:
            raise refused
        return 1.0

    def _idle(self) -> None:
        self._engine.collect()
        if self._checkpointer.has_writes and not self._pending:
            self._send(())
        if not len(self._jobs) and not self._checked:
            self._engine.check()
            gc.collect()  # also empties the lists of freed tuples: 2,000 of each length, which fill over thousands of jobs
            self._checked = True
