"""Wall clocks that are set while everything runs."""

import time
from itertools import product

from chaos.clock import Clock, build, no_clock
from chaos.faults.clocks import ClockStep, Watch, time_of_redis, time_of_server
from chaos.faults.signals import KillForGood
from chaos.place import Engine
from chaos.scenario import Scenario, counts, random_moment, start_apart
from chaos.scenarios.engines import start_second, wait_for_work
from chaos.stage import Stage, engine_url

_STEPS = (60, -60, -3600, 86_400)
_DAY = _STEPS[-1]
_LEASE = 30  #: seconds: shorter than each step, and so long that ``recover`` (4 s on an idle machine) comes before its end
_GRACE_TIMEOUT = 75.0  #: for 30 s a released job is kept for the engine that released it


def clock_steps(stage: Stage, steps: int) -> None:
    """No lease, no order and no token hangs on a wall clock; retention does, on Redis' alone, and a day is less than its seven."""
    cluster = stage.cluster
    second = cluster.another_engine("second")
    watches = _watches(stage, second)
    start_apart(stage)
    start_second(stage, second)
    first = cluster.require_pid("engine")
    kinds = list(product([("redis",), ("engine", "second"), ("redis", "engine", "second", "api")], _STEPS))
    plan = [kinds[number % len(kinds)] for number in range(steps)]
    stage.rng.shuffle(plan)
    with stage.traffic() as traffic:
        for number, (names, seconds) in enumerate(plan):
            random_moment(stage)
            stage.inflict(ClockStep([watches[name] for name in names], seconds))
            stage.wait_progress(20)
            if number % 6 == 2:
                _recover_at_once(stage, second)
            if number % 12 == 5:
                stage.inflict(ClockStep([watches["redis"]], _DAY))
                cluster.stop_role(second.name)
                stage.inflict(ClockStep([watches["redis"]], 0))
                stage.wait_ended(traffic.live_jobs(), _GRACE_TIMEOUT)  # those that it released wait for it no longer than else
                start_second(stage, second)
    if lost := stage.metrics()["lease_lost_total"]:
        stage.violate("I5", f"an engine that lived was declared dead {lost:g} times")
    if cluster.pid("engine") != first:
        stage.violate("I5", "the engine ended because a clock was set")


def _watches(stage: Stage, second: Engine) -> dict[str, Watch]:
    """A clock for each process, under which it will be started."""
    cluster = stage.cluster
    shows = {
        "redis": lambda: time_of_redis(cluster),
        "engine": lambda: time_of_server(engine_url(cluster.main)),
        "second": lambda: time_of_server(engine_url(second)),
        "api": lambda: time_of_server(cluster.url),
    }
    library = build(cluster.place / "clock.so")
    watches = {name: Watch(name, Clock(cluster.place / f"{name}.clock", library), show) for name, show in shows.items()}
    cluster.preludes |= {name: watch.clock.prelude for name, watch in watches.items()}
    return watches


def _recover_at_once(stage: Stage, engine: Engine) -> None:
    """An engine dies, and its jobs are given back by command; then another one comes in its place."""
    wait_for_work(stage, engine)
    stage.inflict(KillForGood(engine))
    began = time.monotonic()
    report = stage.cluster.recover("--release", place=engine)
    took = time.monotonic() - began
    stage.notes.append(f"{', '.join(report['done'])} in {took:.1f} s")
    if took >= _LEASE:
        stage.violate("I8", f"recover --release took {took:.1f} s, and the lease is {_LEASE} s")
    start_second(stage, engine)


SCENARIOS = (
    Scenario(
        "clock_steps",
        clock_steps,
        runs=counts(1, 1, 3),
        faults=counts(3, 24, 60),
        covers="S16",
        meaning="the wall clocks of Redis, engines and api put an hour back, a day ahead: nobody is declared dead, nothing is lost",
        settings={"lease_seconds": str(_LEASE)},
        cannot_run=no_clock,
        device_pages=80,
    ),
)
