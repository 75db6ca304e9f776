"""``--host-pages 0``: no pool file, no checkpoints. A crash costs time, and no token."""

import json
import signal
import threading
from random import Random

import httpx
from prometheus_client import CollectorRegistry

from chaos.cluster import Cluster
from chaos.place import ClusterOptions
from chaos.processes import wait_until as wait_for
from recovery.checkpointer import Checkpointer
from service import sizing
from service.doctor import _sizes
from service.metrics import EngineMetrics
from service.model_size import ModelSize
from service.settings import Settings
from service.worker.observer import EngineObserver
from storage.records import LogRead
from tests.lives import Life, new_store, submit, wait_until
from tests.rigs import make_rig, request


def pageless(folder, model):
    rig = make_rig(folder, model)
    rig.checkpointer = Checkpointer(rig.engine.residency.host)
    return rig


def test_a_checkpointer_without_a_host_cache_never_writes():
    checkpointer = Checkpointer(None)
    checkpointer.written({}, ())
    checkpointer.not_written({}, ())
    assert not checkpointer.has_writes
    assert checkpointer.take_writes() == ({}, ())


def test_a_chain_of_crashes_is_replayed_from_the_logs(tiny_folder, tiny_model):
    jobs = [request(f"job-{i}", n, seed=i or None, max_tokens=14 + 5 * i, order=i) for i, n in enumerate([3, 40, 17])]
    alone = make_rig(tiny_folder, tiny_model)
    for job in jobs:
        alone.add(job)
    whole = alone.run()
    store, rng = new_store(), Random(0)
    submit(store, jobs)

    def length():
        return sum(store.get(job.sequence_id).log_length for job in jobs)

    def ended():
        return all(store.get(job.sequence_id).status.terminal for job in jobs)

    admissions = []
    while not ended():
        life = Life(pageless(tiny_folder, tiny_model), store)
        target = length() + rng.randrange(5, 25)
        wait_until(lambda: ended() or length() >= target)  # noqa: B023
        life.crash()
        admissions += life.observer.admissions
    assert {j.sequence_id: [e.token for e in store.read([LogRead(j.sequence_id)])[0].entries] for j in jobs} == whole
    assert {pages for _, pages, _ in admissions} == {0}
    assert max(replayed for _, _, replayed in admissions) > 0


def test_metrics_say_that_everything_would_be_recomputed(tiny_folder, tiny_model):
    rig, registry = pageless(tiny_folder, tiny_model), CollectorRegistry()
    observer = EngineObserver(EngineMetrics(registry), rig.engine)
    rig.add(request("job", 20))
    while not rig.tokens["job"]:
        observer.stepped(rig.engine.step(), 0.01)
        rig.tokens["job"] = [0] * sum(s.num_generated for s in rig.engine.scheduler.running)
    assert registry.get_sample_value("midsentence_host_pool_usage_perc") == 0
    assert registry.get_sample_value("midsentence_checkpoint_lag_tokens") == 21
    assert registry.get_sample_value("midsentence_swapped_bytes_total", {"direction": "out"}) == 0


def test_sizing_and_doctor_take_zero_for_an_answer(tmp_path):
    settings = Settings(data_dir=tmp_path, host_pages=0, device_pages=8)
    assert sizing.host_pages(settings, 1 << 20, 8, existing=16) == 0
    findings = list(_sizes(settings, tmp_path, ModelSize(1 << 20, 64)))
    assert "no pool file" in findings[-1].found


def test_a_killed_engine_goes_on_and_no_pool_file_is_made(tiny_folder, tmp_path):
    body = {"prompt": list(range(20, 60)), "max_tokens": 300, "seed": 3, "ignore_eos": True}
    with Cluster(tmp_path / "c", ClusterOptions(str(tiny_folder), host_pages=0)) as cluster:
        cluster.serve()
        killed = threading.Event()

        def run(kill_after=None):
            job_id = httpx.post(f"{cluster.url}/v1/jobs", json=body).json()["id"]
            tokens, lines = [], []
            with httpx.stream("GET", f"{cluster.url}/v1/jobs/{job_id}/events", timeout=60) as stream:
                for line in stream.iter_lines():
                    lines.append(line)
                    if line.startswith("data: "):
                        tokens += json.loads(line[6:]).get("token_ids", []) if lines[-2] == "event: token" else []
                    if kill_after is not None and len(tokens) >= kill_after and not killed.is_set():
                        cluster.signal("engine", signal.SIGKILL)
                        killed.set()
            return tokens, httpx.get(f"{cluster.url}/v1/jobs/{job_id}").json()["recovery"]

        tokens, recovery = run(kill_after=50)
        assert killed.is_set()
        assert recovery["count"] == 1
        assert recovery["pages_restored"] == 0
        assert recovery["tokens_replayed"] >= 50
        again, untouched = run()
        assert untouched["count"] == 0
        assert len(tokens) == 300
        assert tokens == again
        assert not list(cluster.main.data_dir.glob("*pool*"))
        wait_for(cluster.ready, 30, "a ready service")
        assert cluster.engine_again_beside().returncode == 78  # one engine for each directory, without a pool too
        assert cluster.recover()["pool"] is None
        assert cluster.stop() == 0
