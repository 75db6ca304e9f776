"""Redis: stopped, slow, full, read-only, forgetful of scripts, behind a bad network."""

from chaos.faults.network import BAD_NETWORKS
from chaos.faults.redis import MOODS
from chaos.faults.signals import Suspend
from chaos.scenario import Scenario, counts, random_moment, serve, start_apart, start_behind_proxy
from chaos.stage import Stage


def redis_pauses(stage: Stage, pauses: int) -> None:
    """Longer than the lease: every engine looks still, and none may be declared dead for it."""
    serve(stage)
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


def redis_moods(stage: Stage, rounds: int) -> None:
    """Everything a Redis that lives can answer besides OK. Each mood passes; no job may notice more than a pause."""
    start_apart(stage)
    moods = [mood for mood in MOODS for _ in range(rounds)]
    stage.rng.shuffle(moods)
    with stage.traffic():
        for mood in moods:
            random_moment(stage)
            stage.inflict(mood)
        stage.wait_progress(50)


def bad_networks(stage: Stage, rounds: int) -> None:
    """Engine and api reach Redis through a proxy that cuts requests and replies anywhere, delays, crumbles and goes silent."""
    proxy = start_behind_proxy(stage)
    faults = [make(proxy, stage.rng) for make in BAD_NETWORKS for _ in range(rounds)]
    stage.rng.shuffle(faults)
    with stage.traffic():
        for fault in faults:
            random_moment(stage)
            stage.inflict(fault)
        stage.wait_progress(50)


SCENARIOS = (
    Scenario(
        "redis_pauses",
        redis_pauses,
        runs=counts(1, 1, 3),
        faults=counts(1, 8, 10),
        covers="S12",
        meaning="Redis stopped for longer than the lease; nobody is declared dead",
    ),
    Scenario(
        "redis_moods",
        redis_moods,
        runs=counts(1, 1, 3),
        faults=counts(1, 4, 8),
        covers="S12 S14 S15",
        meaning="scripts forgotten, connections killed, no memory left, read-only, paused",
    ),
    Scenario(
        "bad_networks",
        bad_networks,
        runs=counts(1, 1, 5),
        faults=counts(2, 12, 60),
        covers="S3 S17",
        meaning="a proxy cuts requests and replies after any byte, delays, crumbles, goes silent",
        seconds=220,
    ),
)
