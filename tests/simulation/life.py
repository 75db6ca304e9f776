"""One life of an engine process: the product's parts, with time, network, disk and copies of the world's."""

from concurrent.futures import Future

from engine.assembly import Hooks
from engine.core import Engine
from engine.pools import DevicePool, HostPool
from engine.scheduler import Budget, Preemption
from recovery.observe import PoolReader, observe
from recovery.plan import plan
from service.worker.loop import EngineLoop
from service.worker.state import Identity, Wakeups, new_incarnation
from service.worker.watch import Watch
from storage.errors import EngineDead, WrongStore
from storage.records import EngineInfo, EngineRecord, JobAnswer, RegisterOutcome
from tests.simulation.copies import SimSwap
from tests.simulation.disk import failed, untroubled
from tests.simulation.hash_model import ARITHMETIC, END, GEOMETRY, MAX_CONTEXT, MODEL, PAGE_BYTES, PAGE_SIZE, TOKENIZER, HashRunner
from tests.simulation.oracle import Violation

LEASE, BEAT, LOOK = 2.0, 0.5, 0.5
STEP, REPLY = 0.04, 0.004  #: mean seconds
DRAIN_PATIENCE = 5.0


class Killed(BaseException):
    """The process dies here."""


class Life:
    def __init__(self, host) -> None:
        world = host.world
        self.host, self.world, self.product, self.name = host, world, world.product, host.name
        self.alive, self.begun, self.draining_since = True, False, None
        self._table: Future | None = None
        self._released: Future | None = None
        self.wakeups = Wakeups()
        self._loop_due = self._store_due = float("inf")
        self._loop_free = self._store_free = 0.0  #: each thread does one thing at a time
        self.connection = self.product.connection(world, self.name)
        if world.redis.store.identity().commit < host.mark:
            raise WrongStore("the store is older than this directory's mark")
        self.pool = None
        self.pool = self._open_pool()
        try:
            self._build()
        except BaseException:
            self.close()
            raise

    # --- parts --------------------------------------------------------------------------------------------------------

    def _open_pool(self):
        host = self.host
        host.disk.before = self._before_disk
        if not host.host_pages:
            return None
        pool = self.product.pool_file.open(
            host.path,
            num_pages=host.host_pages,
            page_shape=GEOMETRY.page_shape,
            dtype=GEOMETRY.dtype,
            model_fingerprint=MODEL,
            disk=host.disk.calls,
        )
        if pool.pool_id != host.pool_id:
            host.pool_id = pool.pool_id
            host.disk.made_anew()
        return pool

    def _build(self) -> None:
        self.info = self._describe()
        self.foretold = self._foretell()
        self.engine = self._make_engine()
        self.checkpointer = self.product.checkpointer(self.engine.residency.host)
        self.store = self.product.store_thread(
            self.connection,
            lambda store: self.loop.heartbeat(store, 60),
            interval=BEAT,
            on_wake=self.wake,
            on_death=self._die_of,
            clock=self.clock,
        )
        incarnation = new_incarnation()
        self.loop = EngineLoop(
            self.engine,
            self.checkpointer,
            self.store,
            Identity(self.info, incarnation, ARITHMETIC),
            self,
            self.wakeups,
            register=lambda again: self.store.submit(lambda store: store.register(self.info, again, blame=False).owned),
            on_mark=self._marked,
            clock=self.clock,
        )
        watching = self.product.connection(self.world, f"{self.name} watch")
        self._watch = Watch(watching, self.name, LEASE, on_change=self.hint, clock=self.clock)
        self._registered = self._register(incarnation)
        self.wake()
        self.after(LOOK, "look", self._look)

    def _describe(self) -> EngineInfo:
        return EngineInfo(
            engine_id=self.name,
            boot_id=f"boot-{self.host.boot}",
            host=self.name,
            pid=1,
            pool_id=self.host.pool_id,
            model_fingerprint=MODEL,
            model_name=MODEL,
            page_size=PAGE_SIZE,
            device_pages=self.world.device_pages,
            max_context=MAX_CONTEXT,
            prefill_chunk=self.world.prefill_chunk,
            arithmetic_fingerprint=ARITHMETIC,
        )

    def _make_engine(self) -> Engine:
        """Limits and policies of its own in every life: no token may depend on them."""
        world, rng, pool, chunk = self.world, self.world.rng, self.pool, self.world.prefill_chunk
        device = DevicePool(world.device_pages, GEOMETRY)
        self.device_bytes = memoryview(device.bytes.numpy().reshape(-1))
        residency = self.product.residency(
            device,
            None if pool is None else HostPool(pool.num_pages, GEOMETRY, pool, sync=self.host.durable_pages),
            prefill_chunk=chunk,
            eviction=rng.choice(("arc", "lru", "fifo")),
            durable=pool is not None,
            reserve=0 if pool is None else rng.choice((1, 2, pool.num_pages // 2)),
            hooks=Hooks(on_problem=lambda event, _: world.note(self.name, event), on_copied=self.wake),
            swap=lambda device, pages, **hooks: SimSwap(self, device, pages, hooks),
        )
        max_running = rng.choice((1, 2, 4, 4))
        budget = Budget(
            max_running,
            max_running + rng.choice((0, 2, 8)),
            rng.choice((chunk, 3 * chunk)),
            chunk,
            rng.choice((Preemption.SWAP, Preemption.REPLAY)),  # AUTO goes by measured, real time
            min_resident_steps=rng.choice((1, 1, 3, 32)),
        )
        runner = HashRunner(device, chunk)
        return Engine(runner, residency, TOKENIZER, budget, max_context=MAX_CONTEXT, eos_token_ids=frozenset((END,)))

    def _register(self, incarnation, seen=None):
        return self.store.submit(lambda store: store.register(self.info, incarnation, blame=False, seen=seen))

    def _foretell(self) -> dict:
        """What ``recover --dry-run`` says about the jobs that we are about to find, by job."""
        if self.pool is None:
            return {}
        reader = PoolReader(self.host.path)
        try:
            seen = observe(self.world.judge, EngineRecord(self.info, "", 0, True, ()), reader, is_alive=lambda _: False)
            return {job.job_id: job for job in plan(seen).jobs}
        finally:
            reader.close()

    # --- time ---------------------------------------------------------------------------------------------------------

    def clock(self) -> float:
        return self.world.now

    def after(self, seconds: float, name: str, action) -> None:
        self.world.after(seconds, f"{self.name}: {name}", action, life=self)

    def wake(self) -> None:
        self._run_loop_at(self.world.now + 0.0005)

    def hint(self) -> None:
        self.wakeups.hint()
        self.wake()

    def _run_loop_at(self, at: float) -> None:
        at = max(at, self._loop_free)
        if at < self._loop_due:
            self._loop_due = at
            self.world.at(at, f"{self.name}: loop", lambda: self._loop_turn(at), life=self)

    def _run_store_at(self, at: float) -> None:
        at = max(at, self._store_free)
        if at < self._store_due:
            self._store_due = at
            self.world.at(at, f"{self.name}: store", lambda: self._store_turn(at), life=self)

    # --- threads ------------------------------------------------------------------------------------------------------

    def _loop_turn(self, at: float) -> None:
        if at != self._loop_due:
            return
        self._loop_due = float("inf")
        self.wakeups.event.clear()
        try:
            wait = self._drain_turn() if self.draining_since is not None else self._turn()
        except (WrongStore, EngineDead) as error:
            self.world.note(self.name, "gives up", type(error).__name__)
            self.die()
            return
        if not self.alive:
            return
        if wait == 0.0:
            self._loop_free = self.world.now + self.world.rng.expovariate(1 / STEP)
        self._run_loop_at(self.world.now + (0.0 if self.wakeups.event.is_set() else wait))
        self._run_store_at(self.world.now + self.world.rng.expovariate(1 / REPLY))
        self.world.oracle.check_engine(self)

    def _turn(self) -> float:
        if self.begun:
            return self.loop.turn()
        if not self._registered.done():
            return 0.25
        answer = self._registered.result()
        if answer.outcome is RegisterOutcome.OTHER_HOST:
            self.world.count("waited one lease for an older boot")
            seen = (answer.holder.incarnation, answer.holder.beat)
            self._registered = self._register(self.loop.identity.incarnation, seen)
            self._store_free = self.world.now + LEASE
        elif answer.outcome is RegisterOutcome.REGISTERED:
            if self._table is None:
                self._table = self.store.submit(lambda store: store.pool_table(self.info.pool_id))
            if not self._table.done():
                return 0.25
            self.checkpointer.adopt(self._table.result())
            self.begun = True
            self.loop.begin(answer.owned)
        else:  # its beat moved, by a late renewal of its last life
            self.die()
        return 0.0

    def _drain_turn(self) -> float:
        """As the process does at SIGTERM: settle, release, end."""
        if self._released is not None:
            if self._released.done():
                self.die("drained")
        elif self.loop.settled():
            jobs, who = self.loop.held_jobs(), self.loop.identity
            self._released = self.store.submit(
                lambda store: store.release(who.info.engine_id, who.incarnation, jobs, affinity=True)
            )
        if self.alive and self.world.now - self.draining_since > DRAIN_PATIENCE:
            self.die()
        return 0.02

    def drain(self) -> None:
        if not self.begun:
            self.die()
            return
        self.draining_since = self.world.now
        self.loop.drain()
        self.wake()

    def _store_turn(self, at: float) -> None:
        if at != self._store_due:
            return
        self._store_due = float("inf")
        wait = self.store.turn()
        if self.world.happens(self.world.faults.slow_network):
            self._store_free = self.world.now + self.world.rng.uniform(0.05, 1.0)
        self._run_store_at(self.world.now + (wait or self.world.rng.expovariate(1 / REPLY)))

    def _look(self) -> None:
        self._watch.look()
        self.after(LOOK, "look", self._look)

    # --- ends ---------------------------------------------------------------------------------------------------------

    def _before_disk(self, call: str, offset: int) -> None:
        faults, oracle = self.world.faults, self.world.oracle
        if call == "pwrite" and self.pool is not None:
            oracle.may_write(self.host, (offset - self.pool.header.data_offset) // PAGE_BYTES)
            if self.world.happens(faults.death_in_write):
                self.world.count("died inside a write")
                raise Killed
        if self.pool is not None and self.world.happens(faults.disk_error):
            self.world.count(f"{call} failed")
            raise failed()

    def _die_of(self, error: BaseException) -> None:
        raise error

    def die(self, how: str = "killed") -> None:
        self.alive = False
        self.host.life = None
        self.world.note(self.name, how)
        self.world.count(how)
        self.world.oracle.life_ended(self)
        self.close()
        self.host.restart()

    def close(self) -> None:
        self.host.disk.before = untroubled
        if self.pool is not None:
            self.pool.close()

    # --- what the loop reports ----------------------------------------------------------------------------------------

    def _marked(self, commit: int) -> None:
        self.host.mark = max(self.host.mark, commit)

    def stepped(self, result, seconds) -> None:
        self.world.count("swapped out", len(result.swapped_out))
        self.world.count("dropped to be replayed", len(result.dropped))

    def committed(self, answers, commits, seconds) -> None:
        for answer in answers.commits:
            self.world.count(f"commit answered {answer.value}")
            if answer is JobAnswer.GAP and not self.world.counts["redis lost its tail"]:
                raise Violation(f"{self.name}: a commit was answered gap, and Redis had lost nothing")

    def admitted(self, held, restored_pages, restart) -> None:
        self.world.oracle.admitted(self, held, restored_pages, restart)

    def dropped(self, job_id, reason) -> None:
        self.world.count(f"dropped, {reason}")

    def declared_dead(self) -> None:
        self.world.count("declared dead")

    def lost(self, tokens) -> None:
        raise AssertionError("a log was found damaged")
