"""The engine process: puts model, pools, store and loop together, and takes them apart in order.

Order of start: model, store, pool lock, registration. Nothing is claimed before pool and store are known to be ours;
``/livez`` answers from the first moment, ``/readyz`` after the jobs found at registration were taken in.
"""

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry

from engine.assembly import Hooks, make_residency
from engine.core import Engine
from engine.residency import Residency
from engine.scheduler import Budget, Preemption
from recovery.checkpointer import Checkpointer
from service.children import LastExit
from service.errors import RegistrationRefused
from service.lease import pace
from service.logs import get_logger
from service.metrics import EngineMetrics
from service.processes import Exit
from service.settings import Settings
from service.store_access import MarkWriter, OpenStore, open_store
from service.tracing import Tracing, start_tracing
from service.worker import garbage
from service.worker.build import Parts, build_parts, explain_refusal, load, refuse_other_model
from service.worker.http import EngineHttp
from service.worker.job_spans import JobSpans, Observers
from service.worker.loop import EngineLoop
from service.worker.observer import EngineObserver
from service.worker.phases import Phases
from service.worker.standby import Turn
from service.worker.state import Identity, Wakeups, new_incarnation
from service.worker.store_thread import StoreThread
from service.worker.vitals import Vitals
from service.worker.watch import Watch
from storage.errors import StoreUnavailable, WrongStore
from storage.failpoints import hit
from storage.job_store import JobStore
from storage.records import EngineInfo, Registered, RegisterOutcome

log = get_logger("engine")

_LOOK_EVERY = 0.02  #: seconds; whether we are to stop, while an answer is awaited


class EngineWorker:
    """One life of the engine process, after its parts are built."""

    def __init__(
        self, settings: Settings, parts: Parts, opened: OpenStore, registry: CollectorRegistry, tracing: Tracing | None = None
    ) -> None:
        self._settings = settings
        self._parts = parts
        self._opened = opened
        self._mark: MarkWriter = opened.mark
        self._wakeups = Wakeups()
        self._stopping = threading.Event()
        self._metrics = EngineMetrics(registry)
        self._store_thread = StoreThread(
            opened.store,
            self._beat,
            interval=pace(settings.lease_seconds),
            on_wake=self._wakeups.wake,
            on_death=end_process,
        )
        self._blame = False
        self._identity = self._make_identity()
        self._spans = None if tracing is None else JobSpans(tracing, opened.engine_id)
        self._engine = self._make_engine()
        self._observer = EngineObserver(self._metrics, self._engine)
        self._checkpointer = Checkpointer(self._engine.residency.host)
        self.loop = self._make_loop()

    def _make_identity(self) -> Identity:
        settings, parts = self._settings, self._parts
        info = EngineInfo(
            engine_id=self._opened.engine_id,
            boot_id=Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
            host=socket.gethostname(),
            pid=os.getpid(),
            pool_id="" if parts.pool_file is None else parts.pool_file.pool_id,
            model_fingerprint=parts.loaded.fingerprint,
            model_name=settings.model,
            page_size=settings.page_size,
            device_pages=parts.device.manager.total_pages,
            max_context=min(settings.max_context or parts.loaded.model.max_context, parts.loaded.model.max_context),
            prefill_chunk=settings.prefill_chunk,
            arithmetic_fingerprint=parts.arithmetic_fingerprint,
        )
        return Identity(info, new_incarnation(), parts.arithmetic_fingerprint)

    def _make_engine(self) -> Engine:
        settings, parts = self._settings, self._parts
        return Engine(
            parts.runner,
            self._make_residency(),
            parts.loaded.tokenizer,
            Budget(
                max_running=settings.max_running,
                max_step_rows=max(settings.max_step_rows, settings.max_running),
                max_step_tokens=settings.max_step_tokens,
                prefill_chunk=settings.prefill_chunk,
                preemption=Preemption(settings.preemption),
            ),
            max_context=self._identity.info.max_context,
            eos_token_ids=frozenset(parts.loaded.model.eos_token_ids),
        )

    def _make_residency(self) -> Residency:
        settings, parts, pool_file = self._settings, self._parts, self._parts.pool_file
        return make_residency(
            parts.device,
            parts.host,
            prefill_chunk=settings.prefill_chunk,
            eviction=settings.eviction,
            durable=pool_file is not None,
            reserve=0 if pool_file is None else min(32, max(1, pool_file.num_pages // 8)),
            retention_seconds=settings.retention_seconds,
            hooks=Hooks(
                on_problem=lambda event, problem: log.warning(event, problem=problem),
                on_copied=self._wakeups.wake,
                on_death=end_process,
                reached=hit,
            ),
        )

    def _make_loop(self) -> EngineLoop:
        return EngineLoop(
            self._engine,
            self._checkpointer,
            self._store_thread,
            self._identity,
            self._observer if self._spans is None else Observers(self._observer, self._spans),
            self._wakeups,
            register=lambda incarnation: self._store_thread.submit(
                lambda store: self._register(store, incarnation, blame=False).owned
            ),
            on_mark=self._mark.update,
        )

    # --- life ---------------------------------------------------------------------------------------------------------

    def run(self, last_exit: LastExit, phases: Phases) -> None:
        """Register, work until SIGTERM, drain. Raises RegistrationRefused or WrongStore where starting again would not help."""
        self._store_thread.start()
        registered = self._store_thread.submit(
            lambda store: self._register(store, self._identity.incarnation, blame=last_exit is LastExit.CRASH)
        )
        table = self._store_thread.submit(lambda store: store.pool_table(self._identity.info.pool_id))
        if not self._await(registered):
            return
        result = registered.result()
        for job_id in result.failed:
            log.error("job_failed_as_poison", job_id=job_id)
        phases.end("registration")
        if not self._await(table):
            return
        self._checkpointer.adopt(table.result())
        phases.end("page_table")
        who, jobs = self._identity, len(result.owned)
        log.info("registered", incarnation=who.incarnation, jobs=jobs, last_exit=last_exit, phases=phases.seconds)
        helpers = ((self._watch, "watch"), (self._hints, "hints"), (self._watchdog, "watchdog"), (self._vitals, "vitals"))
        for target, name in helpers:
            threading.Thread(target=guarded(target), name=name, daemon=True).start()
        self.loop.run(result.owned)
        self._drain()

    def _await(self, answer: Future[Any]) -> bool:
        """False when we are to stop first."""
        while not answer.done():
            if self._stopping.is_set():
                return False
            futures.wait([answer], _LOOK_EVERY)
        return True

    def stop(self) -> None:
        self._stopping.set()
        self.loop.drain()

    def readiness(self) -> dict[str, str]:
        """Why this engine is not ready; empty when it is."""
        state = self.loop.state
        reasons = {}
        if state.draining:
            reasons["draining"] = "stopping after SIGTERM"
        if not state.scanned:
            reasons["recovery"] = "taking in the jobs of the last life"
        if self._store_thread.away_since is not None:
            reasons["redis"] = f"paused: {self._store_thread.away_reason}"
        if state.refused is not None:
            reasons["store"] = str(state.refused)
        return reasons

    def _drain(self) -> None:
        """Answers, copies, release, mark: in that order. Without Redis exit all the same; registration does the rest."""
        deadline = time.monotonic() + self._settings.drain_timeout_seconds * 0.8
        settled = self.loop.settle(timeout=max(0.1, min(10.0, deadline - time.monotonic())))
        jobs, who = self.loop.held_jobs(), self.loop.identity
        if settled and jobs:
            stay = self._settings.drain == "stay"
            self._store_thread.submit(lambda store: store.release(who.info.engine_id, who.incarnation, jobs, affinity=stay))
        answered = self._store_thread.close(max(0.1, deadline - time.monotonic()))
        self._mark.flush()
        if self._spans is not None:
            self._spans.close()
        log.info("drained", jobs=len(jobs), released=settled and answered)

    # --- threads ------------------------------------------------------------------------------------------------------

    def _beat(self, store: JobStore) -> None:
        self.loop.heartbeat(store, self._settings.step_timeout_seconds)

    def _watchdog(self) -> None:
        """A step that hangs is a crash: end the process, so that the supervisor starts another and the job is suspected."""
        while not self._stopping.wait(1.0):
            started = self.loop.state.step_started
            if started is not None and time.monotonic() - started > self._settings.step_timeout_seconds:
                log.critical("step_timeout", seconds=self._settings.step_timeout_seconds, jobs=self.loop.state.held)
                os._exit(Exit.STEP_TIMEOUT)

    def _hints(self) -> None:
        """Wake the loop when something changed in the store, on a connection of its own."""
        store = self._opened.another()
        while not self._stopping.is_set():
            try:
                if store.wait_hint(1.0, tokens=False):
                    self._wakeups.hint()
            except (StoreUnavailable, WrongStore):
                self._stopping.wait(0.5)

    def _watch(self) -> None:
        """Watch the other engines' beats, and end jobs whose deadline passed."""
        watch = Watch(
            self._opened.another(), self._identity.info.engine_id, self._settings.lease_seconds, on_change=self._wakeups.hint
        )
        while not self._stopping.wait(pace(self._settings.lease_seconds)):
            watch.look()

    def _vitals(self) -> None:
        """Tell whoever looks at the dashboard how this engine does."""
        vitals = Vitals(self._engine, self._observer.totals, lambda: self.loop.identity, self._wakeups)
        vitals.run(self._opened.another(), self._stopping)

    # --- registration -------------------------------------------------------------------------------------------------

    def _register(self, store: JobStore, incarnation: str, *, blame: bool) -> Registered:
        """Runs on the store thread. Waits one lease where the record is of another boot: the pool's lock proves nothing there."""
        info = self._identity.info
        answer = store.register(info, incarnation, blame=blame)
        if answer.outcome is RegisterOutcome.OTHER_HOST:
            assert answer.holder is not None
            log.warning("waiting_one_lease", host=answer.holder.info.host, seconds=self._settings.lease_seconds)
            self._stopping.wait(self._settings.lease_seconds)
            seen = (answer.holder.incarnation, answer.holder.beat)
            answer = store.register(info, incarnation, blame=blame, seen=seen)
        if answer.outcome is not RegisterOutcome.REGISTERED:
            raise RegistrationRefused(*explain_refusal(answer, info))
        return answer


def guarded(target: Callable[[], None]) -> Callable[[], None]:
    """A helper thread that dies takes the process with it: a half-living engine is worse than a dead one."""

    def run() -> None:
        try:
            target()
        except BaseException as error:
            end_process(error)

    return run


def end_process(error: BaseException) -> None:
    log.critical("thread_died", exc_info=error)
    os._exit(Exit.FAILED)


def main(settings: Settings, *, last_exit: LastExit = LastExit.CRASH, lock_wait: float = 0.0, turn: Turn | None = None) -> int:
    """Run one engine until SIGTERM. Returns the exit code; refusals are raised for the command line to print.

    ``turn``: it has waited for this, and knows now how the one before it ended.
    """
    turn = turn or Turn(last_exit, None, Phases())
    phases = turn.phases
    phases.end("imports")
    registry = CollectorRegistry()
    worker: list[EngineWorker] = []
    stop = threading.Event()

    def on_signal(_signum: int, _frame: object) -> None:
        stop.set()
        for running in worker:
            running.stop()

    # The step loop shares the interpreter with the store's thread; at the default of 5 ms it waits that long to get it back.
    sys.setswitchinterval(0.0005)
    signal.signal(signal.SIGTERM, on_signal)
    signal.signal(signal.SIGINT, on_signal)
    starting = {"starting": "the model is being loaded; its first start also converts it and compiles kernels"}
    tracing = start_tracing("engine")
    with EngineHttp(settings, registry, lambda: worker[0].readiness() if worker else starting):
        loaded = turn.loaded or load(settings)
        phases.end("model")
        opened = open_store(settings, role="engine", stop=stop)
        refuse_other_model(opened, settings.model, loaded.fingerprint)
        phases.end("store")
        parts = build_parts(settings, loaded, lock_wait=lock_wait, memory=turn.memory)
        threading.Thread(target=parts.device.claim_memory, name="claim-memory", daemon=True).start()
        phases.end("pools")
        worker.append(EngineWorker(settings, parts, opened, registry, tracing))
        garbage.settle()
        if stop.is_set():
            worker[0].stop()
        worker[0].run(turn.last_exit, phases)
    return Exit.OK
