"""One run of one scenario: a cluster under load, a script of faults, then calm, the dump, and every guarantee."""

import contextlib
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random

from chaos.client import Client
from chaos.cluster import Cluster
from chaos.dump import COUNTERS, Dump, EngineGauges, Metrics, dump_jobs, dump_store, pool_files, verify_findings
from chaos.faults.base import Fault, Proof, inflict
from chaos.guarantees import Checker, Run, Violation, check
from chaos.history import FaultRecord, History
from chaos.place import ClusterOptions, Engine, fired_failpoints
from chaos.points import count_points
from chaos.processes import Timeout, wait_until
from chaos.traffic import Traffic
from chaos.workload import Case, Catalogue
from storage.findings import Finding
from storage.records import JobStatus

#: After the last fault every job must end within this time (I8's T), whatever the model's speed here makes of it.
END_TIMEOUT = 180.0
_IDLE_TIMEOUT = 60.0  #: a slow disk has pages to write behind the last job


@dataclass(frozen=True, slots=True)
class Outcome:
    """What is left of a run, for the report."""

    violations: tuple[Violation, ...]
    faults: tuple[FaultRecord, ...]
    jobs: int
    tokens: int  #: received by clients
    problems: tuple[str, ...] = ()  #: what makes a run worthless or failed besides a violation
    notes: tuple[str, ...] = ()
    failpoints: Counter[str] = field(default_factory=Counter)  #: how often each named point fired

    @property
    def good(self) -> bool:
        return bool(self.faults) and all(fault.fired for fault in self.faults) and not self.violations and not self.problems


@dataclass(slots=True)
class Stage:
    """What a scenario's script works with."""

    cluster: Cluster
    history: History
    rng: Random
    catalogue: Catalogue
    extra: list[Violation] = field(default_factory=list)  #: found by the script itself
    notes: list[str] = field(default_factory=list)
    #: what must outlive the cluster: file systems, proxies. Closed when its processes are dead
    resources: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    _start: dict[str, tuple[Engine, EngineGauges]] = field(default_factory=dict)
    _cases: dict[str, str] = field(default_factory=dict)  #: job id -> case, of all traffic so far

    # --- faults and time ----------------------------------------------------------------------------------------------

    def inflict(self, fault: Fault) -> Proof:
        return inflict(fault, self.cluster, self.history)

    def violate(self, guarantee: str, what: str, *, job_id: str = "", evidence: str = "") -> None:
        self.extra.append(Violation(guarantee, job_id, what, evidence))

    def pause(self, low: float, high: float) -> None:
        """A random moment: the one kind of sleep here, since the moment itself is what is tried."""
        time.sleep(self.rng.uniform(low, high))

    def wait_progress(self, tokens: int = 1, timeout: float = 90.0, since: int | None = None) -> None:
        """Until clients received ``tokens`` more than now, or than ``since``. Raises Timeout."""
        goal = (self.history.tokens if since is None else since) + tokens
        wait_until(lambda: self.history.tokens >= goal, timeout, f"{tokens} more tokens for the clients")

    @contextlib.contextmanager
    def stopped(self, role: str, seconds: float) -> Iterator[None]:
        """SIGSTOP around the block, and for ``seconds`` behind it; 0: not at all."""
        pid = self.cluster.signal(role, signal.SIGSTOP) if seconds else 0
        try:
            yield
            time.sleep(seconds)
        finally:
            if pid:
                self.cluster.family.signal(pid, signal.SIGCONT)

    # --- engines ------------------------------------------------------------------------------------------------------

    def watch_engine(self, engine: Engine) -> None:
        """Remember an engine's gauges as they are before any job: where it must come back to."""
        self._start[engine.name] = (engine, Metrics.of(engine_url(engine)).gauges())

    def forget_engine(self, engine: Engine) -> None:
        """It was killed for good."""
        self._start.pop(engine.name, None)

    def metrics(self, engine: Engine | None = None) -> Metrics:
        return Metrics.of(engine_url(engine or self.cluster.main))

    # --- load ---------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def traffic(
        self,
        cases: Sequence[Case] | None = None,
        *,
        clients: int = 8,
        once: bool = False,
        cancel_share: float = 0.1,
        reread_share: float = 0.15,
        twin_share: float = 0.25,
    ) -> Iterator[Traffic]:
        """Clients until the block ends; then every job must end in time, and what they left is judged by ``finish``."""
        chosen = list(self.catalogue.cases.values()) if cases is None else list(cases)
        with Traffic(
            self.cluster.url,
            chosen,
            self.history,
            Random(self.rng.randrange(1 << 60)),
            clients=clients,
            once=once,
            cancel_share=cancel_share,
            reread_share=reread_share,
            twin_share=twin_share,
        ) as traffic:
            yield traffic
            if not traffic.drain(END_TIMEOUT):
                self.violate(
                    "I8", f"clients still wait {END_TIMEOUT:g} s after the last fault", evidence=" ".join(traffic.live_jobs())
                )
            self._cases.update(traffic.accepted)

    def client(self, name: str) -> Client:
        """One more client, for a script that submits by itself; give what it submitted to ``judge``."""
        return Client(name, self.cluster.url, self.history, Random(self.rng.randrange(1 << 60)), threading.Event())

    def judge(self, jobs: Mapping[str, str]) -> None:
        """Jobs (id -> name of its case) that ``finish`` is to judge as those of traffic."""
        self._cases.update(jobs)

    def wait_ended(self, jobs: Collection[str], timeout: float = END_TIMEOUT) -> None:
        """Until all of these jobs are terminal. Raises Timeout."""
        left = set(jobs)

        def ended() -> bool:
            left.difference_update(
                job_id for job_id, job in dump_jobs(self.cluster.url, left).items() if JobStatus(job.status).terminal
            )
            return not left

        wait_until(ended, timeout, f"the end of {len(left)} jobs", pause=0.3)

    # --- the end ------------------------------------------------------------------------------------------------------

    def finish(self, more: Sequence[Checker]) -> Outcome:
        """With the service up and idle: dump, end it, and judge."""
        dump = self._dump()
        run = Run(self.history, dump, self._cases, self.catalogue.answers)
        violations = (*self.extra, *check(run, more))
        faults = tuple(self.history.all(FaultRecord))
        notes = (*self.notes, *(f"{name} {value:g}" for name, value in dump.counters.items() if value and "generation" not in name))
        return Outcome(violations, faults, len(self._cases), self.history.tokens, notes=notes)

    def _dump(self) -> Dump:
        idle, counters = {}, dict.fromkeys(COUNTERS, 0.0)
        for name, (engine, start) in self._start.items():
            url = engine_url(engine)
            with contextlib.suppress(Timeout):  # the gauges as they are then are the evidence
                wait_until(lambda url=url, start=start: Metrics.of(url).gauges() == start, _IDLE_TIMEOUT, "idle engines", pause=0.1)  # type: ignore[misc]
            metrics = Metrics.of(url)
            idle[name] = (start, metrics.gauges())
            for counter in COUNTERS:
                counters[counter] += metrics[counter]
        stored = dump_store(self.cluster.redis_url)
        files = {engine.name: pool_files(engine.data_dir) for engine, _ in self._start.values()}
        jobs = dump_jobs(self.cluster.url, self._cases)
        return Dump(jobs, stored, idle, files, counters, self._verify())

    def _verify(self) -> dict[str, tuple[Finding, ...]]:
        beside = verify_findings(self.cluster.verify())
        self.cluster.stop_all_but_redis()
        after = verify_findings(self.cluster.verify())
        if self.cluster.pid("redis") is None and (left := self.cluster.family.living()):
            self.violate("I12", "verify left processes behind", evidence=str(left))
        return {"beside the service": beside, "after its end": after}


def engine_url(engine: Engine) -> str:
    return f"http://127.0.0.1:{engine.port}"


Script = Callable[[Stage, int], None]


def perform(
    place: Path,
    options: ClusterOptions,
    catalogue: Catalogue,
    script: Script,
    *,
    rng: Random,
    faults: int,
    checkers: Sequence[Checker] = (),
) -> Outcome:
    """Run ``script`` with ``faults`` faults on a cluster of its own. Whatever goes wrong is an outcome, never silence."""
    history = History(place / "history.jsonl")
    with contextlib.ExitStack() as resources, Cluster(place, options) as cluster:
        own = Catalogue(dict(catalogue.cases), dict(catalogue.answers))
        stage = Stage(cluster, history, rng, own, resources=resources)
        try:
            script(stage, faults)
            outcome = stage.finish(checkers)
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
            outcome = Outcome(tuple(stage.extra), tuple(history.all(FaultRecord)), len(stage._cases), history.tokens, (problem,))
        outcome = replace(outcome, failpoints=count_points(fired_failpoints(cluster.failpoint_log)))
    history.close()
    return outcome
