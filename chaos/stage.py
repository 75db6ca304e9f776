"""One run of one scenario: a cluster under load, a script of faults, then calm, the dump, and every guarantee."""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from chaos.cluster import Cluster, ClusterOptions, Engine
from chaos.dump import COUNTERS, Dump, EngineGauges, Metrics, dump_jobs, dump_store, pool_files
from chaos.faults import Fault, Proof, inflict
from chaos.guarantees import Checker, Run, Violation, check
from chaos.history import FaultRecord, History
from chaos.processes import Timeout, wait_until
from chaos.traffic import Traffic
from chaos.workload import Case, Catalogue

#: After the last fault every job must end within this time (I8's T), whatever the model's speed here makes of it.
END_TIMEOUT = 180.0
_IDLE_TIMEOUT = 10.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """What is left of a run, for the report."""

    violations: tuple[Violation, ...]
    faults: tuple[FaultRecord, ...]
    jobs: int
    tokens: int  #: received by clients
    problems: tuple[str, ...] = ()  #: what makes a run worthless or failed besides a violation
    notes: tuple[str, ...] = ()

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

    # --- the end ------------------------------------------------------------------------------------------------------

    def finish(self, more: Sequence[Checker]) -> Outcome:
        """With the service up and idle: dump and judge."""
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
        return Dump(dump_jobs(self.cluster.url, self._cases), stored, idle, files, counters)


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
    with Cluster(place, options) as cluster:
        stage = Stage(cluster, history, rng, catalogue)
        try:
            script(stage, faults)
            outcome = stage.finish(checkers)
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
            outcome = Outcome(tuple(stage.extra), tuple(history.all(FaultRecord)), len(stage._cases), history.tokens, (problem,))
    history.close()
    return outcome
