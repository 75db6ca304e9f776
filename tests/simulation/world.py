"""A seed decides everything: machines, jobs, faults, and the moment of each event. One thread, no clock but ``now``, no waiting.

The code that runs is the product's; simulated are time, network, Redis's process, disk, and the threads of copies.
"""

import heapq
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from hashlib import blake2b
from pathlib import Path

from storage.errors import StoreUnavailable
from storage.records import NewJob
from tests.simulation.hash_model import MODEL, VOCABULARY, Kind, reference
from tests.simulation.host import Host
from tests.simulation.life import LEASE, Killed, Life
from tests.simulation.network import Connection, Redis
from tests.simulation.oracle import Oracle, Violation
from tests.simulation.product import PRODUCT, Product

TROUBLE = 2.5  #: seconds in which things go wrong
PATIENCE = 150.0  #: seconds after them in which every job must come to its end: a reservation and a refused store take their time


@dataclass
class Faults:
    """How likely each is, whenever it could happen. A seed has some and not the others, which would hide each other."""

    lost_request: float = 0.06
    lost_answer: float = 0.06
    doubled: float = 0.05
    cut_pipeline: float = 0.05
    slow_network: float = 0.05
    disk_error: float = 0.06
    death_in_write: float = 0.02


class Failed(AssertionError):
    """A seed whose run broke a promise, with the way to it."""


class Judge:
    """Reads Redis beside the network: what stands there is what counts."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis

    def __getattr__(self, name):
        return lambda *args, **kwargs: self._redis.execute(self._redis.identity, name, args, kwargs)


class World:
    def __init__(self, seed: int, folder: Path, product: Product = PRODUCT) -> None:
        self.seed, self.product = seed, product
        self.rng = rng = random.Random(seed)
        self.now, self._number, self._quiet = 0.0, 0, False
        self._events: list[tuple[float, int, Life | None, str, Callable[[], None]]] = []
        self._loose: list[tuple[str, Callable[[], None]]] = []
        self._among = False
        self.trace: list[tuple[float, str, str]] = []
        self.counts: Counter[str] = Counter()
        self.redis = Redis(product.store(clock=lambda: 1.8e9 + self.now))
        self.judge = Judge(self.redis)
        self.oracle = Oracle(self)
        self.faults = Faults()
        for field in fields(Faults):
            setattr(self.faults, field.name, field.default * rng.choice((0, 0, 0, 0.5, 1, 3)))
        self.weak = rng.random() < 0.15  #: Redis syncs when it pleases
        self.prefill_chunk = rng.choice((4, 8))
        self.device_pages = rng.choice((6, 7, 9, 16))
        self.hosts = {name: Host(self, name, folder / name) for name in ("e1", "e2", "e3")[: rng.choice((1, 2, 2, 3))]}
        self._plan_jobs()
        self._plan_faults()

    # --- what will happen ---------------------------------------------------------------------------------------------

    def _plan_jobs(self) -> None:
        rng = self.rng
        self._jobs: dict[str, NewJob] = {}
        kinds = [draw_kind(rng) for _ in range(rng.randint(1, 4))]
        if rng.random() < 0.3:  # twins, which share even the tail of their prompt
            kinds = [replace(kinds[0], seed=number, temperature=1.0, max_tokens=7) for number in range(len(kinds))]
        last = rng.choice((0.02, 0.02, 0.3, 0.5 * TROUBLE))
        for number, kind in enumerate(kinds):
            new = NewJob(
                f"job-{number}",
                kind.spec.to_json(),
                kind.prompt,
                MODEL,
                kind.max_tokens,
                request_hash="",
                priority=rng.choice((0, 0, 0, 1)),
            )
            self.oracle.know(new.job_id, kind, reference(kind, self.prefill_chunk))
            self._jobs[new.job_id] = new
            self.at(rng.uniform(0, last), f"submit {new.job_id}", lambda new=new: self._submit(new))
            if rng.random() < 0.15:
                self.at(rng.uniform(0.1, 0.5 * TROUBLE), f"cancel {new.job_id}", lambda job_id=new.job_id: self._cancel(job_id))

    def _plan_faults(self) -> None:
        rng = self.rng
        for host in self.hosts.values():
            self.at(rng.uniform(0, 0.3), f"{host.name}: start", host.start)
        faults = [
            self._kill,
            self._kill,
            self._kill,
            self._drain,
            self._stop,
            self._crash_redis,
            self._pause_redis,
            self._lose_power,
        ]
        wanted = rng.sample(faults, rng.randint(0, 5))
        for fault in wanted:
            for _ in range(rng.choice((1, 1, 2, 4))):
                self.at(rng.uniform(0.1, rng.choice((0.6, 1.0)) * TROUBLE), fault.__name__.strip("_").replace("_", " "), fault)
        if self.weak:
            for _ in range(10):
                self.at(rng.uniform(0, TROUBLE), "redis syncs", self.redis.store.sync)
        self.at(TROUBLE, "no more faults", self._end_faults)

    def _insist(self, name: str, call: Callable[[], object]) -> None:
        """A client whose call was not answered sends it again."""
        try:
            call()
        except StoreUnavailable:
            self.after(0.3, name, lambda: self._insist(name, call))

    def _submit(self, new: NewJob) -> None:
        self._insist(f"submit {new.job_id}", lambda: Connection(self, "client").submit(new, queue_limit=10))

    def _cancel(self, job_id: str) -> None:
        self.oracle.cancelled.add(job_id)
        self._insist(f"cancel {job_id}", lambda: Connection(self, "client").cancel(job_id))

    # --- faults -------------------------------------------------------------------------------------------------------

    def _victim(self) -> Host:
        """Rather one that has work."""
        hosts = list(self.hosts.values())
        busy = [host for host in hosts if host.life is not None and host.life.engine.has_work]
        return self.rng.choice(busy if busy and self.rng.random() < 0.8 else hosts)

    def _kill(self) -> None:
        if (life := self._victim().life) is not None:
            life.die()

    def _drain(self) -> None:
        if (life := self._victim().life) is not None and life.draining_since is None:
            life.drain()

    def _stop(self) -> None:
        """SIGSTOP, for less than a lease or for more; then it goes on as if nothing had been."""
        host = self._victim()
        host.stopped_until = self.now + self.rng.uniform(0.2, 2.0) * LEASE
        self.count("stopped")

    def _crash_redis(self) -> None:
        if not self.redis.up:
            return
        self.count("redis crashed")
        self.redis.up = False
        self.redis.generation += 1
        self.after(self.rng.uniform(0.05, 1.5), "redis starts", self._start_redis)
        if self.weak:
            before = self.redis.store.identity().commit
            self.redis.store.crash()
            if self.redis.store.identity().commit < before:
                self.count("redis lost its tail")
                self.oracle.forgive()
                self.after(self.rng.uniform(1.6, 6.0), "the operator accepts the store", self._accept_store)

    def _start_redis(self) -> None:
        self.redis.up = True

    def _accept_store(self) -> None:
        """``recover --accept-store``: marks, owners and incarnations are void; a client whose job is gone submits it again."""
        self.redis.accept_as_it_is()
        for host in self.hosts.values():
            host.mark = 0
        for new in self._jobs.values():
            if self.judge.get(new.job_id) is None:
                self._submit(new)

    def _pause_redis(self) -> None:
        if self.redis.stands_still:
            return
        self.count("redis stood still")
        self.redis.stands_still = True
        self.after(self.rng.choice((0.2, 1.0, 3.0)), "redis goes on", self._continue_redis)

    def _continue_redis(self) -> None:
        self.redis.stands_still = False

    def _lose_power(self) -> None:
        """Everything at once: every process, Redis, and what disks had not synced."""
        self.count("power lost")
        self._crash_redis()
        for host in self.hosts.values():
            host.stopped_until = 0.0
            if host.life is not None:
                host.life.die("lost power")
            host.lose_power()
            self.oracle.check_pool(host)

    def _end_faults(self) -> None:
        self.faults = Faults(*[0.0 for _ in fields(Faults)])
        self._quiet = True

    # --- events -------------------------------------------------------------------------------------------------------

    def at(self, at: float, name: str, action: Callable[[], None], life: Life | None = None) -> None:
        self._number += 1
        heapq.heappush(self._events, (at, self._number, life, name, action))

    def after(self, seconds: float, name: str, action: Callable[[], None], life: Life | None = None) -> None:
        self.at(self.now + seconds, name, action, life)

    def loose(self, name: str, action: Callable[[], None]) -> None:
        """It happens at some time, maybe in the middle of another's call."""
        self._loose.append((name, action))
        self.after(self.rng.expovariate(2.0), name, lambda: self._let_loose((name, action)))

    def meanwhile(self) -> None:
        if self._loose and not self._among and self.rng.random() < 0.1:
            self._let_loose(self.rng.choice(self._loose))

    def _let_loose(self, item: tuple[str, Callable[[], None]]) -> None:
        if item in self._loose:
            self._loose.remove(item)
            self._among = True
            item[1]()
            self._among = False

    def happens(self, likely: float) -> bool:
        return likely > 0 and self.rng.random() < likely

    def note(self, who: str, what: str, outcome: str = "") -> None:
        self.trace.append((self.now, f"{who}: {what}", outcome))

    def count(self, name: str, number: int = 1) -> None:
        self.counts[name] += number

    def hint(self) -> None:
        """Hints may be lost; the engines look every second anyway."""
        for host in self.hosts.values():
            if host.life is not None and self.rng.random() < 0.7:
                host.life.after(0.002, "hint", host.life.hint)

    # --- the run ------------------------------------------------------------------------------------------------------

    def run(self) -> str:
        """Until every job is at its end. The trace's digest; raises Failed."""
        try:
            while not (self._quiet and self.oracle.all_ended):
                self._next()
                if self.now > TROUBLE + PATIENCE:
                    raise Violation(f"not at an end: {self.oracle.unfinished()}")
            for host in self.hosts.values():
                if host.life is not None:
                    self.oracle.check_engine(host.life)
                    self.oracle.life_ended(host.life)
        except Exception as error:
            raise Failed(self._story(error)) from error
        finally:
            for host in self.hosts.values():
                if host.life is not None:
                    host.life.close()
        return blake2b(repr(self.trace).encode(), digest_size=8).hexdigest()

    def _next(self) -> None:
        at, _, life, name, action = heapq.heappop(self._events)
        self.now = at
        if life is not None:
            if not life.alive:
                return
            if life.host.stopped_until > at:
                self.at(life.host.stopped_until, name, action, life)
                return
        self.trace.append((at, name, ""))
        try:
            action()
        except Killed:
            assert life is not None
            life.die()
        self.oracle.check()

    def _story(self, error: Exception) -> str:
        lines = [f"{at:9.4f}  {name}  {outcome}".rstrip() for at, name, outcome in self.trace[-150:]]
        return "\n".join((f"seed {self.seed}: {type(error).__name__}: {error}", *lines, f"seed {self.seed}: {error}"))


def draw_kind(rng: random.Random) -> Kind:
    """Few enough that references are known after some hundred seeds, and that jobs share beginnings."""
    base = rng.randrange(3)
    prompt = [
        (base * 5 + position * 7 + position * position) % VOCABULARY for position in range(rng.choice((1, 3, 4, 5, 8, 9, 12, 13)))
    ]
    sampled = rng.random() < 0.4
    return Kind(
        tuple(prompt),
        max_tokens=rng.choice((3, 7, 12, 12)),
        seed=rng.randrange(2),
        temperature=1.0 if sampled else 0.0,
        repetition_penalty=1.3 if rng.random() < 0.2 else 1.0,
        stop=("c",) if rng.random() < 0.2 else (),
        ignore_eos=rng.random() < 0.7,
    )
