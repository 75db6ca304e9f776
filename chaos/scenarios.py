"""The scenarios: what is done to the service under which load, how often for each tier, and what must hold beyond the usual."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from signal import SIGTERM

from chaos.cluster import Cluster, ClusterOptions
from chaos.faults import (
    Failpoint,
    FlipBit,
    Kill,
    KillEverything,
    KillForGood,
    KillSupervisor,
    KillTogether,
    SecondStart,
    Suspend,
    TerminateService,
)
from chaos.guarantees import Checker, check_undisturbed
from chaos.plans import check_plan, planned_recovery, sealed_pages, settled
from chaos.processes import Timeout, wait_until
from chaos.stage import Script, Stage
from storage.failpoints import FAILPOINTS

TIERS = ("quick", "ci", "soak")
#: The points of the copies and the caches.
PAGE_POINTS = (
    "swap.before_out",
    "swap.after_out",
    "swap.before_in",
    "swap.after_in",
    "evict.before",
    "evict.after",
    "cow.before",
    "cow.after",
    "prefix.before_publish",
    "prefix.after_publish",
)
#: The points around a durable write: those of storage/, of checkpoints, of the step loop.
POINTS = (
    *FAILPOINTS,
    "swap.before_out",
    "swap.after_out",
    "worker.after_claim",
    "worker.after_step",
    "worker.before_commit",
    "worker.after_commit",
)
#: Reached in a drain only.
DRAIN_POINTS = ("release.before",)


@dataclass(frozen=True, slots=True)
class Scenario:
    name: str
    script: Script
    runs: Mapping[str, int]  #: tier -> clusters of its own; 0 leaves it out
    faults: Mapping[str, int]  #: tier -> faults in each run
    meaning: str
    checkers: tuple[Checker, ...] = ()
    settings: Mapping[str, str] = field(default_factory=dict)
    device_pages: int = 160  #: too few for eight long jobs: some are preempted

    def options(self, model: str) -> ClusterOptions:
        return ClusterOptions(model, device_pages=self.device_pages, settings=self.settings)


def _counts(quick: int, ci: int, soak: int) -> dict[str, int]:
    return dict(zip(TIERS, (quick, ci, soak), strict=True))


# --- one process at a time ---------------------------------------------------------------------------------------------


def engine_kills(stage: Stage, kills: int) -> None:
    _serve(stage)
    with stage.traffic():
        stage.wait_progress(20)
        for _ in range(kills):
            _random_moment(stage)
            stage.inflict(Kill("engine"))


def api_kills(stage: Stage, kills: int) -> None:
    _serve(stage)
    with stage.traffic():
        for _ in range(kills):
            _random_moment(stage)
            stage.inflict(Kill("api"))


def redis_kills(stage: Stage, kills: int) -> None:
    _serve(stage)
    with stage.traffic():
        for _ in range(kills):
            _random_moment(stage)
            stage.inflict(Kill("redis"))


def mixed_kills(stage: Stage, kills: int) -> None:
    _serve(stage)
    choices = [
        ("engine",),
        ("api",),
        ("redis",),
        ("engine", "api"),
        ("engine", "redis"),
        ("api", "redis"),
        ("engine", "api", "redis"),
    ]
    with stage.traffic():
        for _ in range(kills):
            _random_moment(stage)
            stage.inflict(KillTogether(stage.rng.choice(choices)))


def failpoint_kills(stage: Stage, hits: int) -> None:
    """Each life of the engine dies at another named point, with the jobs that the last life left."""
    cluster = _start_apart(stage)
    points = [(point, hit) for point in POINTS for hit in range(1, hits + 1)]
    stage.rng.shuffle(points)
    with stage.traffic():
        stage.wait_progress(20)
        stage.inflict(KillForGood(cluster.main))
        for point, hit in points:
            drain = point in DRAIN_POINTS
            # A drain calls each of its points once, so a later hit than the first is never reached there.
            stage.inflict(Failpoint(point, 1 if drain else hit, drain, lambda: stage.wait_progress(20)))
        cluster.start_engine()


def pressure_kills(stage: Stage, rounds: int) -> None:
    """More jobs than pages: each life of the engine dies while pages are swapped, evicted, copied on write or shared."""
    cluster = _start_apart(stage)
    # A copy on write is rare, since two jobs of one prompt must be claimed together: its first hit in a life has to do.
    hits = {point: [1] if point.startswith("cow.") else [1, 2, 5] for point in PAGE_POINTS}
    points = [(point, stage.rng.choice(hits[point])) for point in PAGE_POINTS for _ in range(rounds)]
    stage.rng.shuffle(points)
    with stage.traffic(clients=16, twin_share=0.5):
        stage.wait_progress(400)
        stage.inflict(KillForGood(cluster.main))
        for point, hit in points:
            stage.inflict(Failpoint(point, hit))
        cluster.start_engine()
        stage.wait_progress(2000)
    if not stage.metrics()["num_preemptions_total"]:
        stage.violate("I8", "no job was preempted: there was no pressure")


def engine_terms(stage: Stage, terms: int) -> None:
    _serve(stage)
    with stage.traffic():
        for _ in range(terms):
            _random_moment(stage)
            stage.inflict(Kill("engine", SIGTERM))


# --- the whole service -------------------------------------------------------------------------------------------------


def service_terms(stage: Stage, terms: int) -> None:
    _serve(stage)
    with stage.traffic():
        for _ in range(terms):
            _random_moment(stage)
            stage.inflict(TerminateService())
            stage.cluster.serve()


def supervisor_kills(stage: Stage, kills: int) -> None:
    _serve(stage)
    with stage.traffic():
        for _ in range(kills):
            _random_moment(stage)
            redis = stage.cluster.require_pid("redis")
            stage.inflict(KillSupervisor())
            stage.cluster.serve()
            if stage.cluster.require_pid("redis") != redis:
                stage.violate("I1", "a second Redis was started beside the one that outlived its supervisor")


def everything_kills(stage: Stage, kills: int) -> None:
    """And ``recover --dry-run`` in between lists exactly what the next ``serve`` does."""
    _serve(stage)
    with stage.traffic(cancel_share=0.0) as traffic:
        for _ in range(kills):
            _random_moment(stage)
            before = settled(stage, traffic)
            stage.inflict(KillEverything())
            plan = planned_recovery(stage)
            stage.cluster.serve()
            check_plan(stage, plan, before)


def second_starts(stage: Stage, starts: int) -> None:
    _serve(stage)
    with stage.traffic():
        for _ in range(starts):
            stage.wait_progress(20)
            stage.inflict(SecondStart())
            stage.wait_progress(20)


# --- pages, several engines, the lease ---------------------------------------------------------------------------------


def bit_flips(stage: Stage, flips: int) -> None:
    """All jobs are alive, so every page in the table is one that a job will want back."""
    _serve(stage)
    with stage.traffic(stage.catalogue.longest(8), once=True, cancel_share=0.0, reread_share=0.0):
        wait_until(lambda: len(sealed_pages(stage)) >= 8 + flips, 60.0, "sealed pages")
        pages = stage.rng.sample(sorted(sealed_pages(stage)), flips)
        stage.inflict(KillEverything())
        clean = planned_recovery(stage)
        for page in pages:
            stage.inflict(FlipBit(page, stage.rng.randrange(1 << 30)))
        damaged = planned_recovery(stage)
        received = stage.history.tokens
        stage.cluster.serve()
        stage.wait_progress(20, since=received)  # all jobs may have ended before the service was found ready
        failures = stage.metrics()["page_verify_failures_total"]
        restored = sum(job.pages_restored for job in clean), sum(job.pages_restored for job in damaged)
        stage.notes.append(f"{flips} bits: {failures:g} pages refused, to be restored {restored[0]} -> {restored[1]}")
        if not 1 <= failures <= flips:
            stage.violate("I11", f"{flips} pages are damaged, {failures:g} were refused by checksum")
        if restored[1] >= restored[0]:
            stage.violate("I11", "recover --dry-run counts on damaged pages", evidence=str(restored))
        check_plan(stage, damaged, {})


def two_engines(stage: Stage, kills: int) -> None:
    _serve(stage)
    second = stage.cluster.another_engine("second")
    stage.cluster.start_engine(second)
    wait_until(lambda: stage.cluster.ready(f"http://127.0.0.1:{second.port}"), 90.0, "the second engine")
    with stage.traffic():
        wait_until(lambda: stage.metrics(second)["generation_tokens_total"] > 50, 60.0, "work for the second engine")
        wait_until(lambda: stage.metrics()["generation_tokens_total"] > 50, 60.0, "work for the first engine")
        _random_moment(stage)
        stage.inflict(KillForGood(second))
        stage.wait_progress(100)
        for _ in range(kills - 1):
            _random_moment(stage)
            stage.inflict(Kill("engine"))
    if fenced := stage.metrics()["fenced_writes_rejected_total"]:
        stage.violate("I5", f"{fenced:g} writes of the engine that lived were refused: something ran twice")


def redis_pauses(stage: Stage, pauses: int) -> None:
    """Longer than the lease: every engine looks still, and none may be declared dead for it."""
    _serve(stage)
    engine = stage.cluster.require_pid("engine")
    lease = float(stage.cluster.options.environment()["MIDSENTENCE_LEASE_SECONDS"])
    with stage.traffic():
        for _ in range(pauses):
            stage.wait_progress(20)
            stage.inflict(Suspend("redis", lease + stage.rng.uniform(1.0, 3.0)))
            stage.wait_progress(20)
    if lost := stage.metrics()["lease_lost_total"]:
        stage.violate("I5", f"an engine that lived was declared dead {lost:g} times")
    if stage.cluster.pid("engine") != engine:
        stage.violate("I5", "the engine was started again because Redis stood still")


def _serve(stage: Stage) -> None:
    stage.cluster.serve()
    stage.watch_engine(stage.cluster.main)


def _start_apart(stage: Stage) -> Cluster:
    """Each process by itself, so that every life of the engine can be given its own failpoint."""
    cluster = stage.cluster
    cluster.start_redis()
    cluster.start_engine()
    cluster.start_api()
    cluster.wait_ready()
    stage.watch_engine(cluster.main)
    return cluster


def _random_moment(stage: Stage) -> None:
    """Mostly in the middle of work, one time in four anywhere, which is often while the last victim is still starting."""
    if stage.rng.random() < 0.25:
        stage.pause(0.05, 3.0)
        return
    try:
        stage.wait_progress(stage.rng.choice([1, 5, 40]))
    except Timeout as problem:
        stage.violate("I8", f"no progress between two faults: {problem}")
    stage.pause(0.0, 0.6)


SCENARIOS = (
    Scenario(
        "engine_kills",
        engine_kills,
        runs=_counts(1, 1, 10),
        faults=_counts(24, 100, 100),
        meaning="engine SIGKILL at random moments; clients see a pause, never an error",
        checkers=(check_undisturbed,),
    ),
    Scenario(
        "failpoint_kills",
        failpoint_kills,
        runs=_counts(1, 1, 5),
        faults=_counts(1, 2, 3),
        meaning="engine SIGKILL at each durable write",
        checkers=(check_undisturbed,),
        settings={"durability": "machine"},
    ),
    Scenario(
        "pressure_kills",
        pressure_kills,
        runs=_counts(1, 1, 5),
        faults=_counts(1, 2, 3),
        meaning="engine SIGKILL in swap-out, swap-in, evict, copy-on-write, publish; more jobs than pages",
        checkers=(check_undisturbed,),
        device_pages=64,
    ),
    Scenario(
        "api_kills",
        api_kills,
        runs=_counts(1, 1, 3),
        faults=_counts(8, 30, 60),
        meaning="api SIGKILL; clients resume with Last-Event-ID",
    ),
    Scenario(
        "redis_kills",
        redis_kills,
        runs=_counts(1, 1, 3),
        faults=_counts(8, 30, 60),
        meaning="Redis SIGKILL; the engine pauses and goes on",
    ),
    Scenario(
        "mixed_kills",
        mixed_kills,
        runs=_counts(1, 1, 5),
        faults=_counts(6, 40, 60),
        meaning="any of engine, api, Redis, alone or together",
    ),
    Scenario(
        "supervisor_kills",
        supervisor_kills,
        runs=_counts(1, 1, 3),
        faults=_counts(2, 8, 20),
        meaning="supervisor SIGKILL; its children die with it; serve again",
    ),
    Scenario(
        "everything_kills",
        everything_kills,
        runs=_counts(1, 1, 3),
        faults=_counts(2, 10, 20),
        meaning="all in one instant; recover --dry-run says what serve then does",
        device_pages=400,
    ),
    Scenario(
        "engine_terms",
        engine_terms,
        runs=_counts(1, 1, 2),
        faults=_counts(2, 8, 20),
        meaning="engine SIGTERM: drain, release, go on",
        checkers=(check_undisturbed,),
    ),
    Scenario(
        "service_terms",
        service_terms,
        runs=_counts(1, 1, 3),
        faults=_counts(2, 8, 10),
        meaning="SIGTERM to serve: exit 0, nothing left; serve again",
    ),
    Scenario(
        "second_starts",
        second_starts,
        runs=_counts(1, 1, 2),
        faults=_counts(1, 3, 5),
        meaning="a second start is refused with 78, the first untouched",
        checkers=(check_undisturbed,),
    ),
    Scenario(
        "bit_flips",
        bit_flips,
        runs=_counts(1, 3, 20),
        faults=_counts(2, 2, 4),
        meaning="bits flipped in sealed pages while down: replayed, same text",
        device_pages=400,
    ),
    Scenario(
        "two_engines",
        two_engines,
        runs=_counts(1, 2, 5),
        faults=_counts(1, 3, 5),
        meaning="one engine of two killed for good; the other finishes",
        device_pages=80,
    ),
    Scenario(
        "redis_pauses",
        redis_pauses,
        runs=_counts(1, 1, 3),
        faults=_counts(1, 3, 5),
        meaning="Redis stopped for longer than the lease; nobody is declared dead",
    ),
)
