"""What a scenario is, and what most scripts begin with."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from chaos.cluster import Cluster
from chaos.guarantees import Checker
from chaos.place import ClusterOptions
from chaos.processes import Timeout
from chaos.proxy import Proxy
from chaos.stage import Script, Stage

TIERS = ("quick", "ci", "soak")


@dataclass(frozen=True, slots=True)
class Scenario:
    name: str
    script: Script
    runs: Mapping[str, int]  #: tier -> clusters of its own; 0 leaves it out
    faults: Mapping[str, int]  #: tier -> faults in each run
    covers: str  #: ids of the scenarios of the design that it is
    meaning: str
    checkers: tuple[Checker, ...] = ()
    settings: Mapping[str, str] = field(default_factory=dict)
    device_pages: int = 160  #: too few for eight long jobs: some are preempted
    host_pages: int = 480  #: about what the whole catalogue fills; with fewer, pages are written as long as there are jobs
    seconds: float = 60.0  #: of a run of tier ci, about: the longest begin first, so that none is waited for alone
    cannot_run: Callable[[], str] = str  #: why it cannot run here; empty when it can

    def options(self, model: str) -> ClusterOptions:
        return ClusterOptions(model, device_pages=self.device_pages, host_pages=self.host_pages, settings=self.settings)


def counts(quick: int, ci: int, soak: int) -> dict[str, int]:
    return dict(zip(TIERS, (quick, ci, soak), strict=True))


def serve(stage: Stage) -> None:
    stage.cluster.serve()
    stage.watch_engine(stage.cluster.main)


def start_apart(stage: Stage) -> Cluster:
    """Each process by itself, so that every life of the engine can be given its own failpoint."""
    stage.cluster.start_redis()
    _start_rest(stage)
    return stage.cluster


def start_behind_proxy(stage: Stage) -> Proxy:
    """The same, and a network of our own between Redis and the others."""
    stage.cluster.start_redis()
    proxy = stage.cluster.put_proxy()
    stage.resources.callback(proxy.close)
    _start_rest(stage)
    return proxy


def _start_rest(stage: Stage) -> None:
    cluster = stage.cluster
    cluster.start_engine()
    cluster.start_api()
    cluster.wait_ready()
    stage.watch_engine(cluster.main)


def random_moment(stage: Stage) -> None:
    """Mostly in the middle of work, one time in four anywhere, which is often while the last victim is still starting."""
    if stage.rng.random() < 0.25:
        stage.pause(0.05, 3.0)
        return
    try:
        stage.wait_progress(stage.rng.choice([1, 5, 40]))
    except Timeout as problem:
        stage.violate("I8", f"no progress between two faults: {problem}")
    stage.pause(0.0, 0.6)
