"""The disk as a whole: power loss, and directories put back from a copy."""

import contextlib
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from random import Random
from subprocess import CompletedProcess

import httpx
import redis

from chaos.client import Client
from chaos.cluster import START_TIMEOUT
from chaos.disk import LoopDisk, no_loop_disk
from chaos.dump import dump_jobs, dump_store
from chaos.faults.damage import ExternalRedisPutBack, PutBack, copy_of
from chaos.faults.power import FullDisk, PowerLoss
from chaos.faults.signals import KillEverything
from chaos.history import History
from chaos.processes import Timeout, wait_until
from chaos.scenario import Scenario, counts, random_moment, serve, start_apart
from chaos.stage import Stage
from service.processes import Exit
from storage.errors import StorageError

_PATIENCE = 60.0
#: Steps slow enough that a job which lost tokens has not computed them again when its client asks.
_SLOW = {"failpoints": "worker.after_step=sleep:0.15@*"}


def power_losses(stage: Stage, losses: int) -> None:
    """No token that a client saw is gone. Pages may be: those are found by their checksums; in ``machine`` durability none is."""
    cluster = stage.cluster
    disk = _serve_on_own_disk(stage)
    refused, synced = 0.0, cluster.options.settings["durability"] == "machine"
    with stage.traffic():
        for _ in range(losses):
            random_moment(stage)
            shown = stage.history.shown()
            stage.inflict(PowerLoss(disk, () if synced else ("*",)))
            cluster.serve(wait=False)
            _look_for(stage, shown)
            cluster.wait_ready()
            stage.wait_progress(40)  # every job was taken up again, its pages checked
            refused += stage.metrics()["page_verify_failures_total"]
    stage.notes.append(f"{refused:g} pages refused by checksum")
    if refused and synced:
        stage.violate("G4", f"{refused:g} pages were lost that had reached the disk")


def full_disks(stage: Stage, times: int) -> None:
    """Redis and everything else have no room left for a while. Nobody is to blame for it, and nothing that was shown is gone."""
    cluster = stage.cluster
    _serve_on_own_disk(stage)
    with stage.traffic():
        for _ in range(times):
            random_moment(stage)
            stage.inflict(FullDisk(stage.rng.uniform(0.0, 8.0)))
            cluster.wait_ready()
            stage.wait_progress(40)


def _serve_on_own_disk(stage: Stage) -> LoopDisk:
    disk = LoopDisk(stage.cluster.place / "disk.img", stage.cluster.main.data_dir)
    stage.resources.callback(disk.close)
    serve(stage)
    return disk


def _look_for(stage: Stage, shown: Mapping[str, int]) -> None:
    """Every token that was shown before the power went. Redis is up before any engine: nothing is computed again yet."""
    lengths: dict[str, int] = {}

    def looked() -> bool:
        with contextlib.suppress(OSError, StorageError, redis.RedisError):
            with contextlib.suppress(RuntimeError):  # it answers, and holds no store: everything is gone
                lengths.update((job_id, job.length) for job_id, job in dump_store(stage.cluster.redis_url).items())
            return True
        return False

    try:
        wait_until(looked, START_TIMEOUT, "a look into Redis", pause=0.1)
    except Timeout:
        return  # the service says why
    for job_id, count in shown.items():
        if lengths.get(job_id, 0) < count:
            left = f"{lengths[job_id]} are in its log" if job_id in lengths else "the job is gone"
            stage.violate("I4", f"{count} tokens were shown before the power loss, {left}", job_id=job_id)


def redis_put_back(stage: Stage, times: int) -> None:
    """The directory of Redis alone is older than the mark beside it: refused in words, accepted by the operator's word."""
    serve(stage)
    redis = stage.cluster.main.data_dir / "redis"

    def come_back(copy: Path) -> None:
        _put_back_while_down(stage, redis, copy)
        _expect_refusal(stage, stage.cluster.serve_to_the_end())
        _accept(stage)
        stage.cluster.serve()

    for number in range(times):
        _go_back(stage, redis, number, come_back)


def all_put_back(stage: Stage, times: int) -> None:
    """The whole directory is a consistent past: nothing can refuse it. It goes on from there, and who saw more is told so."""
    serve(stage)
    data = stage.cluster.main.data_dir

    def come_back(copy: Path) -> None:
        _put_back_while_down(stage, data, copy)
        stage.cluster.serve()

    for number in range(times):
        _go_back(stage, data, number, come_back)


def external_put_back(stage: Stage, times: int) -> None:
    """A Redis of one's own comes back older while engine and api live: they say so and change nothing, until it is accepted."""
    cluster = start_apart(stage)

    def come_back(copy: Path) -> None:
        stage.inflict(ExternalRedisPutBack(copy))
        wait_until(lambda: _answer(cluster.url, "jobs") == "wrong_store", _PATIENCE, "an api that refuses this store")
        if (code := cluster.wait_exit("engine", 2 * _PATIENCE)) != Exit.CONFIG:
            stage.violate("G6", f"an engine on a Redis that went back ended with {code}", evidence=cluster.log_tail("engine"))
        _expect_refusal(stage, cluster.engine_again_beside())
        _accept(stage)
        cluster.stop_role("api")
        cluster.start_engine()
        cluster.start_api()
        cluster.wait_ready()

    for number in range(times):
        _go_back(stage, cluster.redis_dir, number, come_back)


def _go_back(stage: Stage, what: Path, number: int, come_back: Callable[[Path], None]) -> None:
    """Jobs begin; a copy of ``what``; they go on, one more is accepted; it comes back as it was; they end all the same."""
    cluster, client = stage.cluster, stage.client(f"owner-{number}")
    jobs = {client.submit(case, _PATIENCE) or "": case.name for case in stage.catalogue.longest(5)}
    _wait_tokens(stage, jobs, 5)
    copy = cluster.place / f"copy-{number}"
    with cluster.family.standstill():
        copy_of(what, copy)
    _wait_tokens(stage, jobs, 25)
    aside = Client("aside", cluster.url, History(), Random(number), threading.Event())
    late = aside.submit(stage.catalogue.longest(1)[0], _PATIENCE) or ""
    seen = {job_id: len(job.token_ids) for job_id, job in dump_jobs(cluster.url, jobs).items()}
    come_back(copy)
    answers = {job_id: _answer(cluster.url, f"jobs/{job_id}/events", cursor) for job_id, cursor in seen.items()}
    if set(answers.values()) != {"cursor_ahead"}:
        stage.violate("G6", "who had seen more than the log has was not told so", evidence=str(answers))
    if (gone := aside.get(late).status) != 404:
        stage.violate("G6", f"a job accepted after the copy was answered {gone}")
    stage.wait_ended(jobs)
    stage.judge(jobs)
    client.close()
    aside.close()


def _put_back_while_down(stage: Stage, what: Path, copy: Path) -> None:
    stage.inflict(KillEverything())
    stage.inflict(PutBack(what, copy))


def _expect_refusal(stage: Stage, start: CompletedProcess[str]) -> None:
    said = start.stderr[-600:]
    if start.returncode != Exit.CONFIG or "lost commits" not in said or "--accept-store" not in said:
        stage.violate("G6", f"a Redis that went back was not refused in words (exit {start.returncode})", evidence=said)


def _accept(stage: Stage) -> None:
    report = stage.cluster.recover("--accept-store")
    if not any("lost commits" in note for note in report["notes"]):
        stage.violate("G6", "recover --accept-store did not say what was lost", evidence=str(report["notes"]))


def _wait_tokens(stage: Stage, jobs: Mapping[str, str], count: int) -> None:
    def reached() -> bool:
        return all(len(job.token_ids) >= count for job in dump_jobs(stage.cluster.url, jobs).values())

    wait_until(reached, _PATIENCE, f"{count} tokens of each job", pause=0.1)


def _answer(url: str, path: str, cursor: int = 0) -> str:
    """The code of the error that is answered, for a client that has seen ``cursor`` tokens; the status where it is none."""
    headers = {"Last-Event-ID": str(cursor)} if cursor else {}
    with httpx.stream("GET", f"{url}/v1/{path}", headers=headers, timeout=15.0, trust_env=False) as answer:
        if answer.status_code < 400:
            return str(answer.status_code)
        answer.read()
        return str(answer.json()["code"])


SCENARIOS = (
    Scenario(
        "power_losses",
        power_losses,
        runs=counts(1, 1, 2),
        faults=counts(2, 25, 50),
        covers="S31",
        meaning="power of the disk cut, durability process: no token lost, every bad page caught",
        settings={"durability": "process"},
        cannot_run=no_loop_disk,
        seconds=430,
    ),
    Scenario(
        "power_losses_machine",
        power_losses,
        runs=counts(0, 1, 2),
        faults=counts(0, 25, 50),
        covers="S31",
        meaning="the same, durability machine: no page lost either",
        settings={"durability": "machine"},
        cannot_run=no_loop_disk,
        seconds=410,
    ),
    Scenario(
        "power_losses_bad_disk",
        power_losses,
        runs=counts(0, 1, 1),
        faults=counts(0, 6, 20),
        covers="S24 S31",
        meaning="the same, and every fdatasync of the pool fails: no page is believed that may not be there",
        settings={"durability": "machine", "failpoints": "pool.before_sync=eio@*"},
        host_pages=160,
        cannot_run=no_loop_disk,
        seconds=140,
    ),
    Scenario(
        "full_disks",
        full_disks,
        runs=counts(0, 1, 2),
        faults=counts(0, 5, 20),
        covers="S15 S22",
        meaning="no room is left for Redis, pool and marks: Redis ends, is started until there is room, and every job goes on",
        cannot_run=no_loop_disk,
        seconds=130,
    ),
    Scenario(
        "redis_put_back",
        redis_put_back,
        runs=counts(1, 1, 2),
        faults=counts(1, 3, 5),
        covers="S13",
        meaning="Redis' directory put back from a copy: refused, accepted by word, goes on, cursors ahead are told",
        settings=_SLOW,
        seconds=240,
    ),
    Scenario(
        "external_put_back",
        external_put_back,
        runs=counts(0, 1, 2),
        faults=counts(0, 1, 3),
        covers="S13",
        meaning="an external Redis comes back older under a running engine and api: both refuse it in words until it is accepted",
        settings=_SLOW,
        seconds=140,
    ),
    Scenario(
        "all_put_back",
        all_put_back,
        runs=counts(0, 1, 2),
        faults=counts(0, 3, 5),
        covers="S13",
        meaning="the whole directory put back: goes on from the past, cursors ahead are told",
        settings=_SLOW,
        seconds=200,
    ),
)
