"""Several engines, and the question who is dead."""

from chaos.faults.engines import Overtake, OvertakeAtPoint
from chaos.faults.signals import Kill, KillForGood
from chaos.guarantees import check_undisturbed
from chaos.place import Engine
from chaos.points import POINTS
from chaos.processes import wait_until
from chaos.scenario import Scenario, counts, random_moment, serve, start_apart
from chaos.stage import Stage, engine_url

#: Where an engine that is stopped holds something that it will send or write once it goes on.
#: Where an engine that is stopped holds something that it will send or write once it goes on.
HOLDING_POINTS = tuple(
    point for point in POINTS if not point.startswith(("release.", "store_file.", "register.", "pool.before_zero"))
)


def two_engines(stage: Stage, kills: int) -> None:
    serve(stage)
    second = stage.cluster.another_engine("second")
    start_second(stage, second)
    with stage.traffic():
        wait_until(lambda: stage.metrics(second)["generation_tokens_total"] > 50, 60.0, "work for the second engine")
        wait_until(lambda: stage.metrics()["generation_tokens_total"] > 50, 60.0, "work for the first engine")
        random_moment(stage)
        stage.inflict(KillForGood(second))
        stage.wait_progress(100)
        for _ in range(kills - 1):
            random_moment(stage)
            stage.inflict(Kill("engine"))
    if fenced := stage.metrics()["fenced_writes_rejected_total"]:
        stage.violate("I5", f"{fenced:g} writes of the engine that lived were refused: something ran twice")


def stale_engines(stage: Stage, rounds: int) -> None:
    """Stopped past its lease, at any moment; another takes its jobs over; then it goes on, and nothing it does may count."""
    cluster = start_apart(stage)
    second = _second_apart(stage)
    with stage.traffic():
        for number in range(rounds):
            victim = (cluster.main, second)[number % 2]
            wait_for_work(stage, victim)
            stage.pause(0.0, 0.5)
            stage.inflict(Overtake(victim))


def stale_at_points(stage: Stage, rounds: int) -> None:
    """The same, stopped at a named point: with a commit in hand, or half a page written."""
    cluster = start_apart(stage)
    second = _second_apart(stage)
    points = [HOLDING_POINTS[number % len(HOLDING_POINTS)] for number in range(rounds)]
    stage.rng.shuffle(points)
    with stage.traffic():
        stage.wait_progress(50)
        for point in points:
            stage.inflict(OvertakeAtPoint(second, point, stage.rng.randrange(1, 6)))
        wait_for_work(stage, cluster.main)


def _second_apart(stage: Stage) -> Engine:
    second = stage.cluster.another_engine("second")
    start_second(stage, second)
    stage.watch_engine(second)
    return second


def start_second(stage: Stage, engine: Engine) -> None:
    stage.cluster.start_engine(engine)
    wait_until(lambda: stage.cluster.ready(engine_url(engine)), 90.0, f"engine {engine.name}")


def wait_for_work(stage: Stage, engine: Engine) -> None:
    wait_until(lambda: stage.metrics(engine)["num_requests_running"] > 0, 60.0, f"work for engine {engine.name}", pause=0.05)


SCENARIOS = (
    Scenario(
        "two_engines",
        two_engines,
        runs=counts(1, 2, 5),
        faults=counts(1, 3, 5),
        covers="S5",
        meaning="one engine of two killed for good; the other finishes",
        device_pages=80,
    ),
    Scenario(
        "stale_engines",
        stale_engines,
        runs=counts(1, 1, 2),
        faults=counts(3, 60, 60),
        covers="S11",
        meaning="SIGSTOP past the lease, another engine takes over, SIGCONT: nothing of the stale one counts",
        checkers=(check_undisturbed,),
        device_pages=80,
        seconds=370,
    ),
    Scenario(
        "stale_at_points",
        stale_at_points,
        runs=counts(0, 1, 2),
        faults=counts(0, 14, 42),
        covers="S11",
        meaning="the same with a commit in hand or a page half written",
        checkers=(check_undisturbed,),
        settings={"durability": "machine"},
        device_pages=80,
        seconds=530,
    ),
)
