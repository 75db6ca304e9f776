"""Every metric in a real run: a service too small for its jobs, whose engine is killed, scraped like any other."""

import json
import signal

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from chaos.cluster import Cluster
from chaos.place import ClusterOptions
from chaos.processes import wait_until
from tests.docs.pages import metric_names

#: Stay 0 where nothing is broken. Those that can be are broken in test_observer.py, test_engine_loop.py and tests/service/api.
NEVER = {
    "midsentence_tokens_lost_total", "midsentence_page_verify_failures_total", "midsentence_lease_lost_total",
    "midsentence_fenced_writes_rejected_total", "midsentence_engines_taken_over_total", "midsentence_jobs_purged_total",
    "midsentence_store_errors_total", "midsentence_pages_unbacked_total",
}  # fmt: skip
#: True of a moment: 0 when all is done.
GAUGES = {"midsentence_num_requests_running", "midsentence_num_requests_waiting", "midsentence_open_streams"}


def scrape(url):
    """Sample name -> sum over its labels."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(httpx.get(f"{url}/metrics", trust_env=False).text):
        for sample in family.samples:
            found[sample.name] = found.get(sample.name, 0.0) + sample.value
    return found


def begin_batch(client, model):
    body = {"model": model, "prompt": [9, 1], "max_tokens": 4}
    line = json.dumps({"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body})
    file = client.post("/v1/files", data={"purpose": "batch"}, files={"file": ("in.jsonl", line)}).json()["id"]
    batch = {"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "24h"}
    return client.post("/v1/batches", json=batch).json()["id"]


@pytest.fixture(scope="module")
def run(tiny_folder, tmp_path_factory):
    """(the most that each sample ever was, a scrape of the end): of api and engine together."""
    patient = {"lease_seconds": "60"}  # the engine comes back before anybody takes its jobs over, however slow the machine
    options = ClusterOptions(str(tiny_folder), device_pages=48, host_pages=300, settings=patient)
    most: dict[str, float] = {}
    with Cluster(tmp_path_factory.mktemp("metrics"), options) as cluster:
        cluster.serve()
        engine_url = f"http://127.0.0.1:{cluster.main.port}"

        def look():
            for url in (cluster.url, engine_url):
                try:
                    last.update(scrape(url))
                except httpx.TransportError:
                    continue  # killed just now
            for name, value in last.items():
                most[name] = max(most.get(name, value), value)

        last: dict[str, float] = {}  # of each sample
        with httpx.Client(base_url=cluster.url, timeout=60, trust_env=False) as client:

            def submit(number, **headers):
                prompt = [9] * 70 + [number]
                body = {"prompt": prompt, "max_tokens": 300, "ignore_eos": True, "temperature": 0}
                return client.post("/v1/jobs", json=body, headers=headers).json()["id"]

            model = client.get("/v1/models").json()["data"][0]["id"]
            answers = {"model": model, "prompt": [9] * 40 + [2], "n": 4, "max_tokens": 12}
            client.post("/v1/completions", json=answers).raise_for_status()  # they share their prompt's pages until they write
            batch = begin_batch(client, model)
            jobs = [submit(number) for number in range(3, 8)]
            assert submit(8, **{"Idempotency-Key": "k"}) == submit(8, **{"Idempotency-Key": "k"})
            wait_until(lambda: look() or most.get("midsentence_num_preemptions_total", 0) > 0, 60.0, "a preemption")
            with client.stream("GET", f"/v1/jobs/{jobs[0]}/events", headers={"Last-Event-ID": "1"}) as stream:
                lines = stream.iter_lines()
                next(lines)
                look()
            before = dict(last)
            cluster.signal("engine", signal.SIGKILL)
            wait_until(lambda: all(client.get(f"/v1/jobs/{job}").json()["finished_at"] for job in jobs), 90.0, "the end", pause=0.2)
            wait_until(lambda: client.get(f"/v1/batches/{batch}").json()["status"] == "completed", 60.0, "the batch", pause=0.2)
            alone = submit(9)  # after a kill nothing can be computed before its pages are there
            wait_until(lambda: client.get(f"/v1/jobs/{alone}").json()["usage"]["completion_tokens"] > 0, 60.0, "its first token")
            cluster.signal("engine", signal.SIGKILL)
            wait_until(lambda: client.get(f"/v1/jobs/{alone}").json()["finished_at"], 60.0, "its end", pause=0.2)
            wait_until(lambda: look() or last["midsentence_num_requests_running"] == 0, 30.0, "the last look")
        assert cluster.stop() == 0
    return most, last, before


def samples_of(name, found):
    return [found[sample] for sample in (name, f"{name}_count") if sample in found]


@pytest.mark.parametrize("name", sorted(metric_names()))
def test_it_is_fed(name, run):
    most, *_ = run
    (value,) = samples_of(name, most) or [None]
    assert value is not None, "no such sample in a real run"
    assert (value == 0) if name in NEVER else (value > 0)


def test_figures_agree_with_each_other(run):
    _, last, before = run
    assert before["midsentence_recoveries_total"] == 0  # the first life had nothing to recover
    assert last["midsentence_recoveries_total"] > 0
    assert 0 < last["midsentence_e2e_request_latency_seconds_count"] <= last["midsentence_jobs"]
    assert last["midsentence_swapped_bytes_total"] % last["midsentence_swapped_pages_total"] == 0
    assert last["midsentence_page_faults_total"] < last["midsentence_page_reads_total"]
    assert last["midsentence_attention_duration_seconds_sum"] < last["midsentence_step_duration_seconds_sum"]
    assert [last[name] for name in GAUGES] == [0, 0, 0]
