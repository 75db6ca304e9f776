"""Jobs as such: poison and bad luck, many of them, one key for fifty, and what is left behind after hundreds."""

from concurrent.futures import ThreadPoolExecutor

from chaos.faults.poison import ANSWER, CASE, Poison
from chaos.faults.signals import Kill, KillEverything, Suspend
from chaos.processes import Vitals, vitals, wait_until
from chaos.scenario import Scenario, counts, serve
from chaos.stage import Stage
from chaos.workload import POISON_TOKEN

_PATIENCE = 120.0
_TOGETHER = 50  #: clients with one key
#: Threads and descriptors that may come on top; a leak would be 200. An api has one of each for every call to its store that is on
#: the way, up to 32: how many there are says how busy it is.
_MORE = {"api": 40}
_CRASHES = ("exit", "raise", "abort", "sleep:3600")  #: the last one hangs until the engine's own watchdog ends it


def poison_jobs(stage: Stage, jobs: int) -> None:
    """Among fifteen good ones: the poison fails at its third crash, and takes nobody along."""
    stage.catalogue.add(CASE, ANSWER)
    serve(stage)
    client, poisoned = stage.client("poisoner"), dict[str, str]()
    good = [case for name, case in stage.catalogue.cases.items() if name != CASE.name]
    with stage.traffic(good, clients=15, cancel_share=0.0):
        for _ in range(jobs):
            stage.wait_progress(40)
            stage.inflict(Poison(client, poisoned))
    stage.judge(poisoned)
    client.close()


def bad_luck(stage: Stage, blows: int) -> None:
    """A healthy job lives through deploys, kills and outages longer than the lease, as many as there are."""
    serve(stage)
    lease = float(stage.cluster.options.environment()["MIDSENTENCE_LEASE_SECONDS"])
    with stage.traffic(stage.catalogue.longest(4), clients=4, once=True, cancel_share=0.0, reread_share=0.0) as traffic:
        wait_until(lambda: len(traffic.live_jobs()) == 4, _PATIENCE, "four jobs")
        for _ in range(blows):
            stage.pause(0.0, 1.0)
            stage.inflict(Kill("engine"))
            stage.inflict(Suspend("redis", lease + 1.0))
        if not traffic.live_jobs():
            stage.violate("I8", "no job was left for the last blow: they were too short to show anything")


def long_run(stage: Stage, crashes: int) -> None:
    """Two hundred jobs after each crash. Nothing hangs, and no process that lived on holds more than it did."""
    serve(stage)
    short = [case for case in stage.catalogue.cases.values() if len(stage.catalogue.answers[case.name].token_ids) < 80]
    before: dict[str, Vitals] = {}
    for number in range(crashes):
        stage.inflict(Kill(("engine", "redis")[number % 2]))
        cases = [stage.rng.choice(short) for _ in range(200)]
        with stage.traffic(cases, clients=16, once=True):
            stage.wait_progress(20)
        now = {role: vitals(stage.cluster.require_pid(role)) for role in ("supervisor", "engine", "api")}
        for role in before.keys() & now.keys():
            if before[role].pid == now[role].pid:
                _compare(stage, role, before[role], now[role])
        before = now if number else {}  # the first two hundred fill caches
    stage.notes.append("; ".join(f"{role}: {value}" for role, value in before.items()))


def _compare(stage: Stage, role: str, before: Vitals, now: Vitals) -> None:
    more = _MORE.get(role, 4)
    if now.threads > before.threads + more or now.descriptors > before.descriptors + more:
        stage.violate("I12", f"{role} holds more after 200 jobs", evidence=f"{before} {now}")
    if now.resident > before.resident + (4 << 20):
        stage.violate(
            "I12", f"{role} grew by {(now.resident - before.resident) >> 20} MiB over 200 jobs", evidence=f"{before} {now}"
        )


def one_key(stage: Stage, rounds: int) -> None:
    """Fifty clients with one Idempotency-Key and one body, and kills between: one job."""
    serve(stage)
    jobs: dict[str, str] = {}
    with ThreadPoolExecutor(_TOGETHER) as pool:
        for number in range(rounds):
            case = stage.rng.choice(list(stage.catalogue.cases.values()))
            clients = [stage.client(f"k{number}-{n}") for n in range(_TOGETHER)]
            answers = [pool.submit(client.submit, case, _PATIENCE, f"one-key-{number}") for client in clients]
            stage.pause(0.0, 0.05)
            stage.inflict(Kill(stage.rng.choice(["api", "redis"])))
            ids = {answer.result() for answer in answers}
            if len(ids) != 1 or None in ids:
                stage.violate("G2", f"fifty submissions of one key had {len(ids)} answers", evidence=str(ids))
            jobs |= {job_id: case.name for job_id in ids if job_id is not None}
            for client in clients:
                client.close()
    stage.wait_ended(jobs)
    stage.judge(jobs)


def many_jobs(stage: Stage, kills: int) -> None:
    """Five hundred jobs in flight when everything dies: all come back, and a new one does not wait behind all of them for ever."""
    serve(stage)
    client, jobs = stage.client("many"), dict[str, str]()
    cases = list(stage.catalogue.cases.values())
    for _ in range(kills):
        for _ in range(500):
            case = stage.rng.choice(cases)
            jobs[client.submit(case, _PATIENCE) or ""] = case.name
        stage.inflict(KillEverything())
        stage.cluster.serve()
    stage.wait_ended(jobs, 600.0)
    stage.judge(jobs)
    client.close()


SCENARIOS = (
    *(
        Scenario(
            f"poison_{action.partition(':')[0]}",
            poison_jobs,
            runs=counts(int(action == "abort"), 1, 2),
            faults=counts(int(action == "abort"), 3, 10),
            covers="S27 S38",
            meaning=f"a prompt that makes the engine {action.partition(':')[0]}, among 15 good jobs: failed at its third crash",
            settings={"failpoints": f"prompt.{POISON_TOKEN}={action}", "step_timeout_seconds": "3"},
        )
        for action in _CRASHES
    ),
    Scenario(
        "poison_slow_starts",
        poison_jobs,
        runs=counts(1, 1, 2),
        faults=counts(1, 2, 4),
        covers="S27",
        meaning="the same where each start takes longer than a lease, so that every crash looks like silence first",
        settings={"failpoints": f"prompt.{POISON_TOKEN}=exit;store_file.after_rename=sleep:7"},
    ),
    Scenario(
        "bad_luck",
        bad_luck,
        runs=counts(0, 1, 2),
        faults=counts(0, 20, 20),
        covers="S8 S12",
        meaning="healthy jobs through 20 engine kills and 20 outages of Redis longer than the lease",
        settings={"failpoints": "worker.after_step=sleep:0.4@*"},
        device_pages=400,
    ),
    Scenario(
        "long_run",
        long_run,
        runs=counts(0, 1, 2),
        faults=counts(0, 6, 20),
        covers="S21",
        meaning="200 jobs after each crash: no hang, no leak, no growth",
    ),
    Scenario(
        "one_key",
        one_key,
        runs=counts(1, 1, 3),
        faults=counts(2, 20, 60),
        covers="S35",
        meaning="fifty submissions with one Idempotency-Key, and kills between: one job",
    ),
    Scenario(
        "many_jobs",
        many_jobs,
        runs=counts(0, 1, 3),
        faults=counts(0, 1, 1),
        covers="S30",
        meaning="500 jobs in flight when everything dies",
    ),
)
