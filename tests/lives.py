"""Lives of an engine on a job store: the loop in a thread of this process, crashed and started again at will."""

import threading
import time
from concurrent.futures import Future

from service.worker.loop import EngineLoop
from service.worker.state import Identity, Wakeups, new_incarnation
from service.worker.store_thread import StoreThread
from storage.job_spec import JobSpec
from storage.memory_store import MemoryJobStore
from storage.records import EngineInfo, NewJob
from tests.rigs import CHUNK, PAGE_SIZE, make_rig


class Quiet:
    """Observes nothing but what tests ask for."""

    def __init__(self):
        self.drops = []
        self.admissions = []
        self.lost_tokens = self.deaths = 0

    def stepped(self, result, seconds):
        pass

    def committed(self, answers, commits, seconds):
        pass

    def admitted(self, held, restored_pages, restart):
        self.admissions.append((held.job_id, restored_pages, restart.replayed))

    def dropped(self, job_id, reason):
        self.drops.append((job_id, reason))

    def declared_dead(self):
        self.deaths += 1

    def lost(self, tokens):
        self.lost_tokens += tokens


class Life:
    """One incarnation of an engine on a store."""

    def __init__(self, rig, store, *, engine_id="e1", blame=False):
        info = EngineInfo(
            engine_id, "boot", "host", 1, f"pool-{engine_id}", "model", "tiny", PAGE_SIZE, 64, 512, CHUNK, "arithmetic"
        )
        self.rig, self.store, self.observer, self.wakeups = rig, store, Quiet(), Wakeups()
        self.errors = []
        self.thread_store = StoreThread(
            store,
            lambda s: self.loop.heartbeat(s, 60),
            interval=0.02,
            on_wake=self.wakeups.wake,
            on_death=self.errors.append,
        )
        identity = Identity(info, new_incarnation(), "arithmetic")
        self.loop = EngineLoop(
            rig.engine,
            rig.checkpointer,
            self.thread_store,
            identity,
            self.observer,
            self.wakeups,
            register=lambda incarnation: self.thread_store.submit(lambda s: s.register(info, incarnation, blame=False).owned),
            on_mark=lambda commit: None,
        )
        self.thread_store.start()
        registered: Future = self.thread_store.submit(lambda s: s.register(info, identity.incarnation, blame=blame))
        self.registered = registered.result(10)
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self):
        try:
            self.loop.run(self.registered.owned)
        except BaseException as error:
            self.errors.append(error)

    def crash(self):
        """End the loop between two steps; what it sent is sent, nothing is released."""
        self.loop.drain()
        self.thread.join(20)
        assert not self.thread.is_alive()
        assert self.thread_store.close(20)
        assert self.errors == []

    def drain(self):
        self.loop.drain()
        self.thread.join(20)
        assert self.loop.settle(10)
        jobs, who = self.loop.held_jobs(), self.loop.identity
        self.thread_store.submit(lambda s: s.release(who.info.engine_id, who.incarnation, jobs, affinity=True)).result(10)
        assert self.thread_store.close(10)


def submit(store, jobs, tenant=""):
    for job in jobs:
        params = job.sampling
        spec = JobSpec("tiny", job.max_tokens, params.seed, temperature=params.temperature, top_p=params.top_p, ignore_eos=True)
        new = NewJob(
            job.sequence_id, spec.to_json(), job.prompt_ids, "model", job.max_tokens, request_hash=job.sequence_id, tenant=tenant
        )
        store.submit(new, queue_limit=100)


def wait_until(condition, seconds=60):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.005)


def new_store():
    store = MemoryJobStore()
    store.bind(store.create("store"))
    return store


def life(folder, model, store, before=None, **options):
    pages = {} if before is None else {"backing": before.rig.backing, "table": store.pool_table("pool-e1"), "first_page": 3}
    return Life(make_rig(folder, model, host_pages=128, **pages), store, **options)
