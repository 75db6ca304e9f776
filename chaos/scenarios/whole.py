"""The whole service at once, and its supervisor."""

from chaos.faults.signals import KillEverything, KillSupervisor, SecondStart, TerminateService
from chaos.guarantees import check_undisturbed
from chaos.plans import check_plan, planned_recovery, settled
from chaos.scenario import Scenario, counts, random_moment, serve
from chaos.stage import Stage


def service_terms(stage: Stage, terms: int) -> None:
    serve(stage)
    with stage.traffic():
        for _ in range(terms):
            random_moment(stage)
            stage.inflict(TerminateService())
            stage.cluster.serve()


def supervisor_kills(stage: Stage, kills: int) -> None:
    serve(stage)
    with stage.traffic():
        for _ in range(kills):
            random_moment(stage)
            redis = stage.cluster.require_pid("redis")
            stage.inflict(KillSupervisor())
            with stage.stopped("redis", seconds=stage.rng.choice([0.0, 2.0])):  # the next one finds a Redis that does not answer
                stage.cluster.serve(wait=False)
            stage.cluster.wait_ready()
            if stage.cluster.require_pid("redis") != redis:
                stage.violate("I1", "a second Redis was started beside the one that outlived its supervisor")


def everything_kills(stage: Stage, kills: int) -> None:
    """And ``recover --dry-run`` in between lists exactly what the next ``serve`` does."""
    serve(stage)
    with stage.traffic(cancel_share=0.0) as traffic:
        for _ in range(kills):
            random_moment(stage)
            before = settled(stage, traffic)
            stage.inflict(KillEverything())
            plan = planned_recovery(stage)
            stage.cluster.serve()
            check_plan(stage, plan, before)


def second_starts(stage: Stage, starts: int) -> None:
    serve(stage)
    with stage.traffic():
        for _ in range(starts):
            stage.wait_progress(20)
            stage.inflict(SecondStart())
            stage.wait_progress(20)


SCENARIOS = (
    Scenario(
        "supervisor_kills",
        supervisor_kills,
        runs=counts(1, 1, 3),
        faults=counts(2, 15, 30),
        covers="S6",
        meaning="supervisor SIGKILL; its children die with it; serve again",
        seconds=240,
    ),
    Scenario(
        "everything_kills",
        everything_kills,
        runs=counts(1, 1, 3),
        faults=counts(2, 15, 30),
        covers="S10",
        meaning="all in one instant; recover --dry-run says what serve then does",
        device_pages=400,
        seconds=600,
    ),
    Scenario(
        "service_terms",
        service_terms,
        runs=counts(1, 1, 3),
        faults=counts(2, 10, 20),
        covers="S8",
        meaning="SIGTERM to serve: exit 0, nothing left; serve again",
        seconds=180,
    ),
    Scenario(
        "second_starts",
        second_starts,
        runs=counts(1, 1, 2),
        faults=counts(1, 5, 10),
        covers="S29",
        meaning="a second start is refused with 78, the first untouched",
        checkers=(check_undisturbed,),
    ),
)
