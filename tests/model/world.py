"""A small world of the commit and fencing protocol (PROTOCOL.md 2-4): engines, a network that loses, delays and doubles, a store.

The store is ``MemoryJobStore``, the one model of Redis that there is; everything around it is as hostile as the protocol allows: an
engine may be judged dead at any moment, also when it lives; a message may arrive after its sender died. What may still happen is
bounded by a ``Budget``, so that the world is finite.
"""

import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from storage import chain
from storage.errors import EngineDead
from storage.records import (
    Commit,
    EngineInfo,
    Finish,
    JobAnswer,
    JobStatus,
    LogEntry,
    NewJob,
    OwnedJob,
)
from tests.model.store import LateClaim, Message, ModelStore
from tests.storage.backends import MODEL, engine_info

_SETTLING = 40  #: rounds in which everything must have come to an end once nothing more goes wrong


@dataclass(frozen=True)
class Budget:
    """What may still go wrong."""

    kills: int = 1
    judgements: int = 1  #: of living engines as dead, too
    losses: int = 1  #: messages and answers
    doubles: int = 1
    cancels: int = 0
    rollbacks: int = 0  #: Redis comes back as it was before its last change (weak durability)
    late_claims: int = 0  #: requests that may outlive their sender

    def less(self, name: str) -> "Budget":
        return replace(self, **{name: getattr(self, name) - 1})


@dataclass(frozen=True)
class Holding:
    """A job as its engine knows it."""

    fence: int
    tokens: tuple[int, ...]
    chain: str
    sent: Commit | None = None  #: not answered yet


@dataclass
class Worker:
    info: EngineInfo
    incarnation: str = ""  #: empty: not running
    held: dict[str, Holding] = field(default_factory=dict)


class Violation(AssertionError):
    """The protocol broke a promise."""


class World:
    def __init__(self, *, workers: int, jobs: int, tokens: int, budget: Budget, without: str = "", store: Any = None) -> None:
        """``store``: another than the model, with its verbs (``scripts.ScriptStore``)."""
        self.store, self.budget, self.without = store or ModelStore(without), budget, without
        self.before: Any = None  #: the last change, for a store that loses it
        self.length = tokens
        self.network: Counter[Message] = Counter()
        self.late: Counter[LateClaim] = Counter()
        self.lives = 0
        self.fruitless: dict[str, int] = {}  #: job -> strikes that it may have: lives since it last made progress
        self.workers = [Worker(engine_info(f"engine-{i}", boot_id="boot-1")) for i in range(workers)]
        self.store.bind(self.store.create("store-1"))
        self.submitted = {f"job-{i}": NewJob(f"job-{i}", "{}", (i,), MODEL, tokens, "") for i in range(jobs)}
        for job in self.submitted.values():
            self.store.submit(job, queue_limit=jobs)
        self.seen: dict[str, tuple[int, ...]] = dict.fromkeys(self.job_ids, ())

    @property
    def job_ids(self) -> tuple[str, ...]:
        return tuple(self.submitted)

    def clone(self) -> "World":
        copy = object.__new__(World)
        copy.__dict__.update(self.__dict__)
        copy.store, copy.network, copy.late = self.store.clone(), self.network.copy(), self.late.copy()
        copy.seen, copy.fruitless = dict(self.seen), dict(self.fruitless)
        copy.workers = [replace(worker, held=dict(worker.held)) for worker in self.workers]
        return copy

    def key(self) -> Any:
        workers = tuple((w.incarnation, tuple(sorted(w.held.items()))) for w in self.workers)
        before = self.before.key() if self.before is not None and self.budget.rollbacks else None
        on_the_way = frozenset(self.network.items()), frozenset(self.late.items())
        parts = (self.store.key(), before, workers, on_the_way, self.budget)
        return parts, tuple(self.seen.values()), tuple(self.fruitless.items())

    # what can happen -------------------------------------------------------------------------------------------------
    def moves(self) -> Iterator[tuple[str, Callable[["World"], None]]]:
        """What may happen next, with a name; each is applied to a copy of this world."""
        budget = self.budget
        for i, worker in enumerate(self.workers):
            if not worker.incarnation:
                yield f"start {i}", lambda world, i=i: world.start(i)
                continue
            yield f"claim {i}", lambda world, i=i: world.claim(i)
            if budget.losses:
                yield f"claim {i}, answer lost", lambda world, i=i: world.claim(i, lost=True)
            if budget.late_claims:
                yield f"claim {i}, held up", lambda world, i=i: world.claim_late(i)
            if budget.kills:
                yield f"kill {i}", lambda world, i=i: world.kill(i)
            for job_id, holding in worker.held.items():
                if holding.sent is None:
                    yield f"step {i} {job_id}", lambda world, i=i, job_id=job_id: world.step(i, job_id)
                elif not self.network[Message(i, worker.incarnation, holding.sent)]:
                    yield f"resend {i} {job_id}", lambda world, i=i, job_id=job_id: world.send(i, job_id)
            if budget.judgements:
                yield f"judge {i}", lambda world, i=i: world.judge(i)
        for message in self.network:
            name = f"{message.worker} {message.commit.job_id} {message.commit.expected} of {message.incarnation}"
            yield f"deliver {name}", lambda world, m=message: world.deliver(m)
            if budget.losses:
                yield f"deliver {name}, answer lost", lambda world, m=message: world.deliver(m, answered=False)
                yield f"lose {name}", lambda world, m=message: world.lose(m)
            if budget.doubles:
                yield f"double {name}", lambda world, m=message: world.double(m)
        for late in self.late:
            yield f"claim of {late.incarnation} arrives", lambda world, late=late: world.arrive(late)
        if budget.cancels:
            for job_id in self.job_ids:
                yield f"cancel {job_id}", lambda world, job_id=job_id: world.cancel(job_id)
        if budget.rollbacks and self.before is not None:
            yield "roll back", lambda world: world.roll_back()

    def start(self, i: int) -> None:
        """A new incarnation, after a crash that may be a job's fault: the worst case for strikes."""
        worker = self.workers[i]
        self.lives += 1
        worker.incarnation = f"life-{self.lives}"
        strikes = {job_id: self.store.record(job_id).strikes for job_id in self.job_ids}
        registered = self._change(lambda store: store.register(worker.info, worker.incarnation, blame=True))
        self._count_strikes(strikes)
        worker.held = {owned.job_id: self._load(owned) for owned in registered.owned}

    def claim(self, i: int, lost: bool = False) -> None:
        worker = self.workers[i]
        if lost:
            self.budget = self.budget.less("losses")
        strikes = {job_id: self.store.record(job_id).strikes for job_id in self.job_ids}
        try:
            given = self._change(
                lambda store: store.claim(
                    worker.info.engine_id, worker.incarnation, held=tuple(worker.held), free_pages=100, limit=1
                )
            )
        except EngineDead:
            self._stop(i)
            return
        self._count_strikes(strikes)
        if not lost:
            worker.held |= {owned.job_id: self._load(owned) for owned in given}

    def claim_late(self, i: int) -> None:
        self.budget = self.budget.less("late_claims")
        self.late[LateClaim(i, self.workers[i].incarnation, tuple(self.workers[i].held))] += 1

    def arrive(self, late: LateClaim) -> None:
        self.late -= Counter([late])
        engine_id = self.workers[late.worker].info.engine_id
        strikes = {job_id: self.store.record(job_id).strikes for job_id in self.job_ids}
        with suppress(EngineDead):
            self._change(lambda store: store.claim(engine_id, late.incarnation, held=late.held, free_pages=100, limit=1))
        self._count_strikes(strikes)

    def step(self, i: int, job_id: str) -> None:
        """Compute a token and send it. No two lives compute the same one: whose it is shows."""
        worker = self.workers[i]
        holding = worker.held[job_id]
        token = token_of(holding.tokens, worker.incarnation)
        last = len(holding.tokens) + 1 == self.length
        sent = Commit(
            job_id,
            holding.fence,
            len(holding.tokens),
            chain.extend(holding.chain, token),
            (LogEntry(token, ""),),
            Finish(JobStatus.COMPLETED, "stop") if last else None,
        )
        worker.held[job_id] = replace(holding, sent=sent)
        self.send(i, job_id)
        if self.without == "output commit":
            self.seen[job_id] = (*holding.tokens, token)

    def send(self, i: int, job_id: str) -> None:
        sent = self.workers[i].held[job_id].sent
        assert sent is not None
        self.network[Message(i, self.workers[i].incarnation, sent)] += 1

    def deliver(self, message: Message, answered: bool = True) -> None:
        self.lose(message, free=answered)
        worker, job_id = self.workers[message.worker], message.commit.job_id
        owner = self.store.record(job_id)
        listens = answered and worker.incarnation == message.incarnation and worker.held.get(job_id) is not None
        try:
            answer = self._change(lambda store: store.deliver(worker.info.engine_id, message))
        except EngineDead:
            if answered and worker.incarnation == message.incarnation:
                self._stop(message.worker)
            return
        if answer is JobAnswer.OK:
            self.fruitless[job_id] = 0
            if (owner.incarnation, owner.fence) != (message.incarnation, message.commit.fence):
                raise Violation(f"a commit of {message.incarnation} was accepted, the owner is {owner.incarnation}")
        if not listens or worker.held[job_id].sent != message.commit:
            return
        if answer in (JobAnswer.OK, JobAnswer.ALREADY):
            holding, commit = worker.held[job_id], message.commit
            tokens = (*holding.tokens, *(entry.token for entry in commit.tokens))
            worker.held[job_id] = Holding(holding.fence, tokens, commit.chain)
            if commit.finish is not None:
                del worker.held[job_id]
        else:
            del worker.held[job_id]

    def lose(self, message: Message, free: bool = False) -> None:
        self.network -= Counter([message])
        if not free:
            self.budget = self.budget.less("losses")

    def double(self, message: Message) -> None:
        self.network[message] += 1
        self.budget = self.budget.less("doubles")

    def kill(self, i: int) -> None:
        self.budget = self.budget.less("kills")
        self._stop(i)

    def judge(self, i: int) -> None:
        self.budget = self.budget.less("judgements")
        engine_id = self.workers[i].info.engine_id
        for record in self.store.engines():  # a store that was rolled back may not know it
            if record.info.engine_id == engine_id:
                self._change(lambda store, record=record: store.take_over(engine_id, record.incarnation, record.beat))

    def cancel(self, job_id: str) -> None:
        self.budget = self.budget.less("cancels")
        self._change(lambda store: store.cancel(job_id))

    def roll_back(self) -> None:
        """What was seen may be gone, as weak durability says; nothing else may break."""
        assert self.before is not None
        self.budget = self.budget.less("rollbacks")
        self.store, self.before = self.before, None
        self.seen = {job_id: self.store.log(job_id) for job_id in self.job_ids}
        self.fruitless = {job_id: self.store.record(job_id).strikes for job_id in self.job_ids}

    def _stop(self, i: int) -> None:
        self.workers[i].incarnation, self.workers[i].held = "", {}

    def _load(self, owned: OwnedJob) -> Holding:
        return Holding(owned.fence, self.store.log(owned.job_id), self.store.record(owned.job_id).chain)

    def _change(self, call: Callable[[Any], Any]) -> Any:
        if self.budget.rollbacks:
            self.before = self.store.clone()
        return call(self.store)

    def _count_strikes(self, before: dict[str, int]) -> None:
        for job_id, strikes in before.items():
            if self.store.record(job_id).strikes > strikes:
                self.fruitless[job_id] = self.fruitless.get(job_id, 0) + 1

    # what must hold --------------------------------------------------------------------------------------------------
    def check(self, earlier: "World") -> None:
        """After a move from ``earlier``. A client reads whatever the log holds, at once."""
        for job_id in self.job_ids:
            record, old, log = self.store.record(job_id), earlier.store.record(job_id), self.store.log(job_id)
            seen = self.seen[job_id]
            if log[: len(seen)] != seen and not (self.without == "output commit" and seen[: len(log)] == log):
                raise Violation(f"{job_id}: a client saw {seen}, the log says {log}")
            self.seen[job_id] = max(seen, log, key=len)
            rolled_back = self.budget.rollbacks < earlier.budget.rollbacks
            if old.status.terminal and not rolled_back and (record != old or log != earlier.store.log(job_id)):
                raise Violation(f"{job_id} changed after its end")
            for index, token in enumerate(log):
                if _MADE[token] != log[:index]:
                    raise Violation(f"{job_id}: token {index} was computed from {_MADE[token]}, before it stands {log[:index]}")
            lives = self.fruitless.get(job_id, 0)
            if record.strikes > lives:
                raise Violation(f"{job_id} has {record.strikes} strikes, but made progress {lives} lives ago")

    def settle(self) -> None:
        """Nothing goes wrong any more: every job must come to its end."""
        world = self.clone()
        world.budget = Budget(0, 0, 0, 0)
        for _ in range(_SETTLING):
            if all(world.store.record(job_id).status.terminal for job_id in world.job_ids):
                return
            earlier = world.clone()
            for message in list(world.network):
                world.deliver(message)
            for i, worker in enumerate(world.workers):
                if not worker.incarnation:
                    world.start(i)
                world.claim(i)
                for job_id in list(worker.held):
                    sent = worker.held[job_id].sent
                    world.step(i, job_id) if sent is None else world.send(i, job_id)
            world.check(earlier)
        raise Violation(f"not at an end: {[world.store.record(job_id).status.value for job_id in world.job_ids]}")


_MADE: dict[int, tuple[int, ...]] = {}  #: token -> the tokens that it was computed from


def token_of(context: tuple[int, ...], incarnation: str) -> int:
    token = zlib.crc32(repr((context, incarnation)).encode())
    assert _MADE.setdefault(token, context) == context
    return token
