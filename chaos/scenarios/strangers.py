"""What does not belong to each other: jobs and another model, a living service and an empty Redis."""

import os
import shutil
import time
from dataclasses import dataclass, replace
from pathlib import Path

import httpx

from chaos.cluster import START_TIMEOUT, Cluster
from chaos.faults.base import Proof
from chaos.faults.signals import KillEverything, KillForGood
from chaos.processes import Timeout, wait_until
from chaos.scenario import Scenario, counts, random_moment, serve, start_apart
from chaos.stage import Stage, engine_url
from service.processes import Exit

_EMPTY_SECONDS = 4.0
_LOOK_SECONDS = 15.0  #: until an engine that goes on would have gone on


@dataclass(frozen=True, slots=True)
class OtherWeights:
    """Somebody trains the model a little further, under its old name."""

    folder: Path
    name: str = "other weights under the same name"

    def apply(self, cluster: Cluster) -> Proof:
        path = next(self.folder.glob("*.safetensors"))
        before = path.read_bytes()
        half = len(before) // 2
        path.write_bytes(before[:half] + bytes(byte ^ 0x10 if at % 4 == 2 else byte for at, byte in enumerate(before[half:])))
        return Proof(path.read_bytes() != before, f"{path}: {len(before)} bytes")


def other_models(stage: Stage, times: int) -> None:
    """Jobs are in progress; the model's weights are replaced. Not one token may come of it; with the old ones back all go on."""
    cluster = stage.cluster
    folder = cluster.place / "model"
    original = Path(cluster.options.model)
    shutil.copytree(original, folder)
    cluster.options = replace(cluster.options, model=str(folder))
    serve(stage)
    with stage.traffic(stage.catalogue.longest(8), once=True, cancel_share=0.0, reread_share=0.0):
        for _ in range(times):
            stage.wait_progress(20)
            stage.inflict(KillEverything())
            stage.inflict(OtherWeights(folder))
            _refused_or_waiting(stage)
            for path in original.iterdir():
                shutil.copy2(path, folder / path.name)
            cluster.serve()


def _refused_or_waiting(stage: Stage) -> None:
    """Jobs that are still this engine's: refused in words. If the api was faster and took them over, they wait in a queue.

    That no token came of the other weights shows at the end: every job has those of its reference.
    """
    cluster = stage.cluster
    cluster.serve(wait=False)
    # On a slow machine a start takes longer than the look.
    begun = engine_url(cluster.main)
    wait_until(lambda: cluster.pid("supervisor") is None or cluster.ready(begun), START_TIMEOUT, "a refusal, or an engine")
    try:
        code = cluster.wait_exit("supervisor", _LOOK_SECONDS)
    except Timeout:
        stage.notes.append("another model: jobs wait")
        if tokens := stage.metrics()["generation_tokens_total"]:
            stage.violate("G6", f"{tokens:g} tokens of another model's jobs were computed")
        cluster.kill_all()
    else:
        stage.notes.append("another model: refused")
        said = cluster.log_tail("serve")
        if code != Exit.CONFIG or "recover --release" not in said:
            stage.violate("G6", f"another model was not refused in words (exit {code})", evidence=said[-600:])
        cluster.kill_all()  # Redis, if it was left


@dataclass(frozen=True, slots=True)
class EmptyRedis:
    """Redis comes back without its data, answers so for some seconds, and then comes back with them."""

    name: str = "an empty Redis for a moment"

    def apply(self, cluster: Cluster) -> Proof:
        data = cluster.redis_dir / "appendonlydir"
        aside = cluster.place / "appendonlydir"
        _stop_redis(cluster)
        os.rename(data, aside)
        cluster.start_redis()
        time.sleep(_EMPTY_SECONDS)
        wait_until(lambda: not cluster.ready(), 10.0, "the api says that it is not ready", pause=0.1)
        answer = httpx.get(f"{cluster.url}/v1/jobs", timeout=15.0, trust_env=False).status_code
        _stop_redis(cluster)
        shutil.rmtree(data, ignore_errors=True)
        os.rename(aside, data)
        cluster.start_redis()
        cluster.wait_ready()
        return Proof(answer == 503, f"while it was empty, /v1/jobs was answered {answer}")


def _stop_redis(cluster: Cluster) -> None:
    KillForGood(replace(cluster.main, name="redis")).apply(cluster)


def emptied_redis(stage: Stage, times: int) -> None:
    """Nobody takes an empty Redis for news: engines keep their memory, clients are told to wait, jobs go on."""
    start_apart(stage)
    with stage.traffic():
        for _ in range(times):
            random_moment(stage)
            stage.inflict(EmptyRedis())
            stage.wait_progress(20)


SCENARIOS = (
    Scenario(
        "other_models",
        other_models,
        runs=counts(0, 1, 2),
        faults=counts(0, 3, 5),
        covers="S32",
        meaning="the model's weights replaced under its name: refused with 78; the old ones back: goes on",
        settings={"failpoints": "worker.after_step=sleep:0.15@*"},  # so that jobs are left for each fault
    ),
    Scenario(
        "redis_emptied",
        emptied_redis,
        runs=counts(1, 1, 2),
        faults=counts(1, 5, 10),
        covers="S15",
        meaning="Redis answers as if it had never had anything: everybody waits, nothing is dropped",
    ),
)
