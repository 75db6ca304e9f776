"""One process at a time, by signal at any moment or by itself at a named point."""

from signal import SIGTERM

from chaos.cluster import START_TIMEOUT
from chaos.dump import dump_jobs
from chaos.faults.points import ApiFailpoint, Failpoint
from chaos.faults.signals import Kill, KillForGood, KillTogether, Succession
from chaos.guarantees import check_undisturbed
from chaos.points import API_POINTS, DRAIN_POINTS, ONCE_POINTS, PAGE_POINTS, POINTS
from chaos.processes import wait_until
from chaos.scenario import Scenario, counts, random_moment, serve, start_apart
from chaos.stage import Stage, engine_url
from storage.records import JobStatus


def engine_kills(stage: Stage, kills: int) -> None:
    serve(stage)
    with stage.traffic():
        stage.wait_progress(20)
        for _ in range(kills):
            random_moment(stage)
            stage.inflict(Kill("engine"))


def standby_kills(stage: Stage, kills: int) -> None:
    """An engine waits: it takes over, half prepared or wholly; or it dies, alone or with the one that serves."""
    serve(stage)
    with stage.traffic():
        for number in range(kills):
            stage.wait_progress(20)
            if number % 4 < 2:
                stage.inflict(Succession(stage.rng.uniform(0.0, 4.0)))
            else:
                stage.inflict(KillTogether(("standby",) if number % 4 == 2 else ("standby", "engine")))


def api_kills(stage: Stage, kills: int) -> None:
    serve(stage)
    with stage.traffic():
        for _ in range(kills):
            random_moment(stage)
            stage.inflict(Kill("api"))


def redis_kills(stage: Stage, kills: int) -> None:
    serve(stage)
    with stage.traffic():
        for _ in range(kills):
            random_moment(stage)
            stage.inflict(Kill("redis"))


def mixed_kills(stage: Stage, kills: int) -> None:
    serve(stage)
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
            random_moment(stage)
            stage.inflict(KillTogether(stage.rng.choice(choices)))


def failpoint_kills(stage: Stage, hits: int) -> None:
    """Each life of the engine dies at another named point, with the jobs that the last life left."""
    cluster = start_apart(stage)
    points = [(point, 1 if point in ONCE_POINTS else hit) for point in POINTS for hit in range(1, hits + 1)]
    stage.rng.shuffle(points)
    with stage.traffic():
        stage.wait_progress(20)
        stage.inflict(KillForGood(cluster.main))
        for point, hit in points:
            drain = point in DRAIN_POINTS
            # Without its time being over a page is zeroed only where a crash left something, and not each did.
            settings = {"retention_seconds": "1"} if point == "pool.before_zero" else {}
            stage.inflict(Failpoint(point, hit, drain, lambda: stage.wait_progress(20), settings))
        cluster.start_engine()


def pressure_kills(stage: Stage, rounds: int) -> None:
    """More jobs than pages: each life of the engine dies while pages are swapped, evicted, copied on write or shared."""
    cluster = start_apart(stage)
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
    serve(stage)
    with stage.traffic():
        for _ in range(terms):
            random_moment(stage)
            stage.inflict(Kill("engine", SIGTERM))


def api_failpoint_kills(stage: Stage, hits: int) -> None:
    """Each life of the api dies around the write that accepts or cancels a job; the client knows nothing and asks again.

    Or behind the first call of a take over, when the only engine is dead: the next life finishes what it began.
    """
    cluster = start_apart(stage)
    points = [(point, stage.rng.randrange(1, 4)) for point in API_POINTS for _ in range(hits)]
    stage.rng.shuffle(points)
    with stage.traffic(cancel_share=0.5):
        stage.wait_progress(20)
        for point, hit in points:
            if point == "take_over.after":
                stage.inflict(KillForGood(cluster.main))
                stage.inflict(ApiFailpoint(point, 1))
                cluster.start_engine()  # registered before the next one dies: of a dead engine nothing is taken over twice
                wait_until(lambda: cluster.ready(engine_url(cluster.main)), START_TIMEOUT, "the engine")
            else:
                stage.inflict(ApiFailpoint(point, hit))
        cluster.start_api()


def every_token(stage: Stage, lives: int) -> None:
    """Each life of the engine dies behind its first commit: every kind of job is taken up again at every one of its tokens."""
    cluster = start_apart(stage)
    short = stage.catalogue.shortest(12)
    with stage.traffic(short, clients=12, once=True, cancel_share=0.0, reread_share=0.0) as traffic:
        wait_until(lambda: len(traffic.accepted) == len(short), 60.0, "all jobs")
        stage.inflict(KillForGood(cluster.main))
        for _ in range(lives):
            jobs = dump_jobs(cluster.url, traffic.accepted).values()
            if all(JobStatus(job.status).terminal for job in jobs):
                break
            stage.inflict(Failpoint("worker.after_commit", 1))
        cluster.start_engine()


SCENARIOS = (
    Scenario(
        "engine_kills",
        engine_kills,
        runs=counts(1, 1, 10),
        faults=counts(24, 100, 100),
        covers="S2",
        meaning="engine SIGKILL at random moments; clients see a pause, never an error",
        checkers=(check_undisturbed,),
        seconds=720,
    ),
    Scenario(
        "standby_kills",
        standby_kills,
        runs=counts(1, 1, 2),
        faults=counts(2, 12, 40),
        covers="S2",
        meaning="engine SIGKILL while another waits to take over, and SIGKILL of the one that waits, or of both",
        checkers=(check_undisturbed,),
        seconds=150,
    ),
    Scenario(
        "failpoint_kills",
        failpoint_kills,
        runs=counts(1, 2, 5),
        faults=counts(1, 3, 6),
        covers="S1 S3 S4",
        meaning="engine SIGKILL at each durable write",
        checkers=(check_undisturbed,),
        settings={"durability": "machine"},
        host_pages=160,
        seconds=510,
    ),
    Scenario(
        "every_token",
        every_token,
        runs=counts(0, 1, 3),
        faults=counts(0, 60, 60),
        covers="S34",
        meaning="a kill at every token of greedy, seeded, penalised, stopped and JSON jobs, in any script",
        checkers=(check_undisturbed,),
        device_pages=400,
        seconds=420,
    ),
    Scenario(
        "slow_disk",
        engine_kills,
        runs=counts(0, 1, 2),
        faults=counts(0, 8, 20),
        covers="S23",
        meaning="every page takes 0.2 s to write and a second to sync, and the engine is killed: nobody waits for pages",
        checkers=(check_undisturbed,),
        settings={"durability": "machine", "failpoints": "pool.before_write=sleep:0.2@*;pool.before_sync=sleep:1@*"},
    ),
    Scenario(
        "pressure_kills",
        pressure_kills,
        runs=counts(1, 2, 5),
        faults=counts(1, 3, 3),
        covers="S1",
        meaning="engine SIGKILL in swap-out, swap-in, evict, copy-on-write, publish; more jobs than pages",
        checkers=(check_undisturbed,),
        device_pages=64,
        seconds=270,
    ),
    Scenario(
        "api_failpoint_kills",
        api_failpoint_kills,
        runs=counts(1, 1, 3),
        faults=counts(1, 5, 10),
        covers="S1 S26 S35",
        meaning="api SIGKILL around the write that accepts, cancels or takes over a job: one job, whatever the client repeats",
        seconds=150,
    ),
    Scenario(
        "api_kills",
        api_kills,
        runs=counts(1, 1, 3),
        faults=counts(8, 30, 60),
        covers="S5 S25",
        meaning="api SIGKILL; clients resume with Last-Event-ID",
        seconds=120,
    ),
    Scenario(
        "redis_kills",
        redis_kills,
        runs=counts(1, 1, 3),
        faults=counts(8, 50, 100),
        covers="S9",
        meaning="Redis SIGKILL; the engine pauses and goes on",
    ),
    Scenario(
        "mixed_kills",
        mixed_kills,
        runs=counts(1, 1, 5),
        faults=counts(6, 40, 60),
        covers="S5 S10 S26",
        meaning="any of engine, api, Redis, alone or together",
        seconds=260,
    ),
    Scenario(
        "engine_terms",
        engine_terms,
        runs=counts(1, 1, 2),
        faults=counts(2, 20, 40),
        covers="S8",
        meaning="engine SIGTERM: drain, release, go on",
        checkers=(check_undisturbed,),
        seconds=180,
    ),
)
